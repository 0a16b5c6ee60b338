"""Test benchmarks/sglang_cycle.py from end to end, without a GPU and without SGLang."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from repository import ROOT, TESTS

pytest.importorskip("torch")

BENCHMARKS = ROOT / "benchmarks"

SMI = """#!/bin/sh
case "$*" in *"-i 1 "*) echo 1200;; *memory.used*) echo 1000;; *) echo "Some GPU, 1.2.3";; esac
"""


@pytest.fixture
def machine(benchmark_module, tmp_path, monkeypatch):
    """Create a folder with a fake engine, torch_memory_saver and nvidia-smi; return it."""
    shutil.copytree(TESTS / "fixtures" / "sglang_engine", tmp_path / "site")
    (tmp_path / "site" / "torch_memory_saver").mkdir()
    (tmp_path / "site" / "torch_memory_saver" / "__init__.py").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "site")  # relative; engines run in other folders
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(benchmark_module, machine, monkeypatch, warm_children):
    """Run the benchmark; return the status, the rows by metric, and the engines' log."""

    def call(*arguments, fault=""):
        monkeypatch.setenv("STAND_IN_FAULT", fault)
        cycle = benchmark_module("sglang_cycle")
        short = ["--small", "--wait=0", "--touch-gib=0", "--cycles=2", "--decodes=3"]
        short += ["--trainer-gb=0.05", "--output=out.json"]
        options = cycle.parser().parse_args([*short, *arguments])
        options.device = "cpu"
        status = cycle.run(options)
        path = machine / "out.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        log = machine / "log"
        engines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return status, {row["metric"]: row for row in rows}, engines

    return call


def are_running(pids):
    """Return the processes that do not end within ten seconds."""
    end = time.monotonic() + 10
    left = list(pids)
    while left and time.monotonic() < end:
        time.sleep(0.01)
        left = [pid for pid in left if is_running(pid)]
    return left


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.long
def test_the_rows_of_a_whole_run(run, capsys):
    status, rows, engines = run("--only=fraction,cycle", "--fractions=0.80,0.90")
    fraction = rows.pop("sglang_max_mem_fraction")
    assert (fraction["memsaver"], fraction["peer_value"]) == (0.9, 0.8)
    assert fraction["peer"] == "memsaver, waking all at once"
    assert fraction["detail"]["memsaver"] == {"0.8": "completed", "0.9": "completed"}
    assert fraction["detail"]["peer"]["0.8"] == "completed"
    assert "no room for ['cuda_graph', 'kv_cache'" in fraction["detail"]["peer"]["0.9"]

    counts = {metric: len(row["detail"]["memsaver"]) for metric, row in rows.items()}
    assert counts.pop("sglang_decode_tokens_per_s") == 2
    assert counts == {
        "sglang_release_weights_first_ms": 1,
        "sglang_release_weights_ms": 2,
        "sglang_release_weights_unchanged_ms": 2,
        "sglang_resume_weights_ms": 5,
        "sglang_release_kv_ms": 5,
        "sglang_resume_kv_ms": 5,
        "sglang_start_s": 1,
    }
    decode = rows["sglang_decode_tokens_per_s"]
    assert [len(decode["detail"]["peer"][part]) for part in ("before", "after")] == [3, 3]
    assert decode["ratio"] == round(decode["memsaver"] / decode["peer_value"], 4)
    for row in rows.values():
        assert (row["bench"], row["peer"]) == ("sglang_cycle", "torch_memory_saver")
        assert row["gpu"] == "Some GPU" and row["memsaver"] > 0

    # Two fractions and both libraries; all processes have ended, and none ran in the source tree.
    assert [kind for _, kind, _ in engines] == ["ours"] * 3 + ["theirs"]
    assert not are_running(pid for pid, _, _ in engines)
    assert not any(Path(where).is_relative_to(ROOT) for _, _, where in engines)
    assert status == 0  # a lack of memory is an expected result
    assert "0.9, at_once: no room" in capsys.readouterr().err


@pytest.mark.long
def test_engines_that_share_the_gpu(run):
    status, rows, engines = run("--only=plain,switch", "--turns=2")
    assert status == 0
    assert [kind for _, kind, _ in engines] == ["ours", "plain", *["ours"] * 2, *["theirs"] * 2]
    assert not are_running(pid for pid, _, _ in engines)
    decode = rows["sglang_decode_tokens_per_s"]
    assert decode["peer"] == "SGLang without a memory saver"
    assert len(decode["detail"]["memsaver"]) == len(decode["detail"]["peer"]) == 4
    switch = rows["sglang_switch_ms"]  # the last row of this metric
    assert switch["peer"] == "torch_memory_saver"
    assert (len(switch["detail"]["memsaver"]), len(switch["detail"]["peer"])) == (10, 3)
    assert switch["detail"]["peer_asleep_MiB"] == [1000.0]
    resident = rows["sglang_resident_MiB"]
    assert (resident["memsaver"], resident["ratio"]) == (1000.0, 1.0)


@pytest.mark.long
def test_an_engine_on_two_gpus(run):
    status, rows, engines = run("--only=tp2")
    assert status == 0 and [kind for _, kind, _ in engines] == ["ours"] * 4
    for more in ("", "_8_ctas"):
        row = rows.pop(f"sglang_resident_tp2{more}_MiB")
        assert row["detail"]["memsaver"] == row["detail"]["peer"] == [1200.0] * 2
        assert row["detail"]["memsaver_gpus"] == [[1000.0, 1200.0]] * 2
        assert len(rows.pop(f"sglang_resume_tp2{more}_ms")["detail"]["peer"]) == 2
    assert not rows


@pytest.mark.long
def test_a_switch_that_changes_the_output_gets_no_row(run, capsys):
    status, rows, _ = run("--only=switch", "--no-peer", fault="loses")
    assert (status, rows) == (1, {})
    assert "instead of" in capsys.readouterr().err


@pytest.mark.long
def test_the_first_engine_of_a_run_is_not_measured(run):
    status, rows, engines = run("--only=cycle", "--no-peer")
    assert (status, rows) == (0, {})  # without a peer, values are only printed
    assert [kind for _, kind, _ in engines] == ["ours", "ours"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("loses", "memsaver, first: the weights have changed"),
        ("wrong", "this engine should have the saver of"),
    ],
)
def test_a_fault_that_invalidates_figures_is_a_failure_without_rows(run, capsys, fault, message):
    status, rows, engines = run("--only=cycle", fault=fault)
    assert (status, rows) == (1, {})
    assert message in capsys.readouterr().err
    assert not are_running(pid for pid, _, _ in engines)


@pytest.mark.long
def test_figures_measured_before_a_failure_are_kept(run, capsys):
    status, rows, engines = run("--only=cycle", fault="stale")
    assert status == 1
    assert "the update did not change the weights" in capsys.readouterr().err
    assert "sglang_release_weights_unchanged_ms" in rows
    assert "sglang_release_weights_ms" not in rows
    detail = rows["sglang_decode_tokens_per_s"]["detail"]["memsaver"]
    assert (len(detail["before"]), detail["after"]) == (3, [])
    assert not are_running(pid for pid, _, _ in engines)


@pytest.mark.long
def test_contents_that_could_not_be_compared_are_reported(run, capsys):
    status, rows, _ = run("--only=cycle", fault="silent")
    assert status == 1 and "sglang_release_weights_ms" in rows
    assert "contents were not compared: no kernel" in capsys.readouterr().err


@pytest.mark.long
def test_an_engine_that_dies_when_waking_at_once_gets_a_second_one_for_the_stages(run, capsys):
    status, rows, engines = run("--only=fraction", "--fractions=0.8,0.9", fault="dies")
    row = rows["sglang_max_mem_fraction"]
    assert (row["memsaver"], row["peer_value"]) == (0.9, 0.8)
    assert status == 1 and "at_once: memsaver ended in at_once" in capsys.readouterr().err
    assert len(engines) == 3
    assert not are_running(pid for pid, _, _ in engines)


@pytest.mark.long
def test_an_engine_that_does_not_wake_up_beside_nobody_is_a_failure(run, capsys):
    status, rows, _ = run("--only=fraction", "--fractions=0.8,0.99")
    row = rows["sglang_max_mem_fraction"]
    assert status == 1 and (row["memsaver"], row["peer_value"]) == (0.8, 0.8)
    assert "does not wake up" in row["detail"]["memsaver"]["0.99"]
    assert "mem_fraction_static 0.99, staged" in capsys.readouterr().err


@pytest.mark.long
def test_a_way_that_never_completes_gives_no_row(run, capsys):
    status, rows, _ = run("--only=fraction", "--fractions=0.9")
    assert (status, rows) == (1, {})
    assert "at_once never completed; try smaller --fractions" in capsys.readouterr().err


def test_without_the_peer_or_sglang_nothing_is_measured(run, machine, capsys):
    shutil.rmtree(machine / "site" / "torch_memory_saver")
    assert run("--only=cycle") == (2, {}, [])
    assert "torch_memory_saver is not installed" in capsys.readouterr().err


def test_an_engines_environment_selects_one_saver(benchmark_module, monkeypatch, tmp_path):
    environment = benchmark_module("sglang_engine").environment
    monkeypatch.chdir(tmp_path)
    inherited = {
        "PYTHONPATH": f"a{os.pathsep}{os.pathsep}/b",
        "MEMSAVER_SGLANG": "0",
        "SGLANG_PLUGINS": "other",
        "TMS_INIT_ENABLE": "1",
        "NCCL_GRAPH_REGISTER": "1",
        "HOME": "/home",
    }
    ours, theirs = environment("memsaver", inherited), environment("tms", inherited)
    assert (ours["MEMSAVER_SGLANG"], theirs["MEMSAVER_SGLANG"]) == ("1", "0")
    assert ours["PYTHONPATH"] == f"{tmp_path}/a{os.pathsep}/b"
    assert ours["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == theirs["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    assert ours["NCCL_GRAPH_REGISTER"] == "1" and ours["HOME"] == "/home"
    assert not {"SGLANG_PLUGINS", "TMS_INIT_ENABLE"} & set(ours)


def test_memory_that_stays_in_use_is_a_failure(benchmark_module, machine, monkeypatch):
    processes = benchmark_module("engine_process")
    processes.wait_until_free(1000 - processes.NOISE_MIB)
    monkeypatch.setattr(processes, "FREE_SECONDS", 0)
    with pytest.raises(benchmark_module("children").Failed, match="1000 MiB of the GPU are in use"):
        processes.wait_until_free(500)


def test_the_big_model_is_qwen3_8b(benchmark_module, tmp_path):
    engine_model = benchmark_module("engine_model")
    weights = dict(engine_model.checkpoint(engine_model.BIG))
    assert len(weights) == 3 + 36 * 11
    elements = sum(size[0] * (size[1] if len(size) > 1 else 1) for size in weights.values())
    assert 2 * elements == 16_381_470_720
    engine_model.write_config(engine_model.SMALL, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 8192


def test_a_trainers_values_depend_on_the_seed(benchmark_module):
    torch = pytest.importorskip("torch")
    engine_model = benchmark_module("engine_model")
    trainer = engine_model.Trainer(engine_model.SMALL, device="cpu")
    found = []
    for seed in (1, 2, 1):
        trainer.take(seed)
        found.append(dict(trainer.weights)["model.layers.0.mlp.up_proj.weight"].clone())
        trainer.drop()
        assert not trainer.weights
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


@pytest.mark.parametrize(
    ("metric", "memsaver", "peer", "ratio", "met"),
    [
        ("sglang_release_weights_ms", 400.0, 5000.0, 12.5, "yes"),
        ("sglang_release_weights_unchanged_ms", 400.0, 5000.0, 12.5, "not met"),
        ("sglang_release_weights_first_ms", 400.0, 500.0, 1.25, ""),
        ("sglang_resume_weights_ms", 400.0, 1599.0, 3.9975, "not met"),
        ("sglang_release_kv_ms", 30.0, 31.0, 1.0333, "yes"),
        ("sglang_decode_tokens_per_s", 1400.0, 1410.0, 0.9929, "yes"),
        ("sglang_decode_tokens_per_s", 1400.0, 1420.0, 0.9859, "not met"),
        ("sglang_max_mem_fraction", 0.94, 0.86, 1.093, "yes"),
        ("sglang_max_mem_fraction", 0.86, 0.82, 1.0488, "not met"),
        ("sglang_max_mem_fraction", 0.94, 0.9, 1.0444, "not met"),
        ("sglang_start_s", 31.0, 30.0, 0.9677, ""),
    ],
)
def test_rows_reach_or_miss_their_goals(benchmark_module, metric, memsaver, peer, ratio, met):
    row = {"metric": metric, "memsaver": memsaver, "peer_value": peer, "ratio": ratio}
    row["peer"] = "torch_memory_saver"
    assert benchmark_module("report").verdict(row, [row]) == met


@pytest.mark.parametrize("text", ["", "0.5,x", "0.5,1.0", "-0.1"])
def test_fractions_lie_between_0_and_1(benchmark_module, text, capsys):
    parser = benchmark_module("sglang_cycle").parser()
    with pytest.raises(SystemExit):
        parser.parse_args([f"--fractions={text}"])
    assert "numbers between 0 and 1" in capsys.readouterr().err
    assert parser.parse_args([]).fractions == [0.86, 0.9, 0.94]
