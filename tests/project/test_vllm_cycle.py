"""Tests benchmarks/vllm_cycle.py from end to end, without a GPU and without vLLM."""

import json

import pytest
from repository import TESTS

pytest.importorskip("torch")


@pytest.fixture
def run(benchmark_module, nvidia_smi, tmp_path, monkeypatch, warm_children):
    """Run the benchmark; return the status, the rows by metric, and the engines' log."""
    site = str(TESTS / "fixtures" / "vllm_benchmark")
    monkeypatch.setenv("PYTHONPATH", site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    monkeypatch.setattr(benchmark_module("parts.vllm_sleep"), "LIMITS", "fake_limits:Limits")

    def call(*arguments, fault=""):
        monkeypatch.setenv("FAKE_FAULT", fault)
        cycle = benchmark_module("vllm_cycle")
        short = ["--small", "--wait=0", "--touch-gib=0", "--cycles=2", "--decodes=3"]
        options = cycle.parser().parse_args([*short, f"--output={tmp_path / 'out'}", *arguments])
        options.device = "cpu"
        status = cycle.run(options)
        path, log = tmp_path / "out", tmp_path / "log"
        rows = json.loads(path.read_text()) if path.exists() else []
        engines = log.read_text().split("\n")[:-1] if log.exists() else []
        return status, {row["metric"]: row for row in rows}, engines

    return call


@pytest.mark.long
def test_the_rows_of_a_whole_run(run):
    status, rows, engines = run()
    assert status == 0 and engines == ["ours 1", "theirs 1"]
    counts = {metric: len(row["detail"]["memsaver"]) for metric, row in rows.items()}
    assert counts == {
        "vllm_sleep_first_ms": 1,
        "vllm_sleep_changed_ms": 2,
        "vllm_sleep_unchanged_ms": 2,
        "vllm_wake_weights_ms": 5,
        "vllm_wake_kv_ms": 5,
        "vllm_resident_MiB": 5,
        "vllm_decode_tokens_per_s": 6,
    }
    for row in rows.values():
        assert (row["bench"], row["peer"]) == ("vllm_cycle", "vLLM's own allocator")
        assert len(row["detail"]["peer"]) == counts[row["metric"]]
    limits = {metric: row["limit"] for metric, row in rows.items() if row["limit"] is not None}
    assert limits == {"vllm_sleep_changed_ms": 4.0, "vllm_wake_kv_ms": 0.0}  # MiB of the tags
    decode = rows["vllm_decode_tokens_per_s"]
    assert decode["ratio"] == round(decode["memsaver"] / decode["peer_value"], 4)


@pytest.mark.long
def test_without_time_each_kind_of_cycle_runs_once(run):
    status, rows, _ = run("--seconds=0", "--gpus=2")
    assert status == 0
    assert len(rows["vllm_tp2_wake_kv_ms"]["detail"]["memsaver"]) == 3
    assert rows["vllm_tp2_resident_MiB"]["memsaver"] == 1200.0  # of the GPU with more
    assert not any(row["limit"] for row in rows.values())


@pytest.mark.long
def test_engines_that_decode_in_turns(run):
    status, rows, engines = run("--only=decode", "--turns=2")
    assert status == 0 and engines == ["ours 1", "theirs 1"]
    detail = rows["vllm_decode_tokens_per_s"]["detail"]
    assert len(detail["memsaver"]) == len(detail["peer"]) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("loses", "memsaver, first: changed: weights, output"),
        ("wrong", "this engine should have the allocator of memsaver"),
        ("degenerate", "the prompts have no effect on the output"),
    ],
)
def test_a_fault_that_invalidates_figures_is_a_failure_without_rows(run, capsys, fault, message):
    status, rows, _ = run("--no-peer", fault=fault)
    assert (status, rows) == (1, {})
    assert message in capsys.readouterr().err
