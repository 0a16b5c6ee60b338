"""Tests benchmarks/sglang_cycle.py from end to end, without a GPU and without SGLang."""

import json
import shutil
import time
from pathlib import Path

import pytest
from repository import ROOT, TESTS

pytest.importorskip("torch")


@pytest.fixture
def machine(benchmark_module, nvidia_smi, tmp_path, monkeypatch):
    """Create a folder with fakes of the engine, torch_memory_saver and nvidia-smi; return the
    folder.
    """
    shutil.copytree(TESTS / "fixtures" / "sglang_engine", tmp_path / "site")
    (tmp_path / "site" / "torch_memory_saver").mkdir()
    (tmp_path / "site" / "torch_memory_saver" / "__init__.py").touch()
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
    """Return the processes that do not exit within ten seconds."""
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
    resident = rows["sglang_resident_MiB"]["detail"]  # of one engine, then of two that share it
    assert switch["detail"]["peer_asleep_MiB"] == resident["memsaver"] == [1000.0, 500.0]


@pytest.mark.long
def test_engines_with_backups_on_another_gpu(run, benchmark_module, monkeypatch):
    switch = benchmark_module("parts.sglang_switch")
    status, rows, _ = run("--only=neighbour")
    assert status == 1 and not rows  # the other GPU has as much memory in use as before

    read, reads = switch.used_mib, []

    def used_mib(place=0):
        reads.append(place)
        return read(place) + 500 * max(0, reads.count(1) - 1)

    monkeypatch.setattr(switch, "used_mib", used_mib)
    status, rows, engines = run("--only=neighbour")
    assert status == 0 and [kind for _, kind, _ in engines] == ["ours"] * 8
    row = rows.pop("sglang_switch_peer_ms")
    assert row["peer"] == "memsaver, backups in host memory" and not rows
    assert len(row["detail"]["memsaver"]) == len(row["detail"]["peer"]) == 10
    assert row["detail"]["memsaver_neighbour_MiB"] == [1700.0]


@pytest.mark.long
def test_an_engine_on_two_gpus(run):
    status, rows, engines = run("--only=tp2")
    assert status == 0 and [kind for _, kind, _ in engines] == ["ours"] * 6
    for more in ("", "_8_ctas", "_64_ctas"):
        row = rows.pop(f"sglang_resident_tp2{more}_MiB")
        assert row["detail"]["memsaver"] == row["detail"]["peer"] == [1200.0] * 2
        assert row["detail"]["memsaver_gpus"] == [[1000.0, 1200.0]] * 2
        assert len(rows.pop(f"sglang_resume_tp2{more}_ms")["detail"]["peer"]) == 2
    assert not rows


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "fault", "message"),
    [
        (["--only=cycle"], "loses", "memsaver, first: the weights have changed"),
        (["--only=cycle"], "wrong", "this engine should have the saver of"),
        (["--only=switch", "--no-peer"], "loses", "instead of"),
        (["--only=fraction", "--fractions=0.9"], "", "at_once never completed; try smaller"),
    ],
)
def test_a_fault_that_invalidates_figures_is_a_failure_without_rows(
    run, capsys, arguments, fault, message
):
    status, rows, engines = run(*arguments, fault=fault)
    assert (status, rows) == (1, {})
    assert message in capsys.readouterr().err
    assert not are_running(pid for pid, _, _ in engines)


@pytest.mark.long
@pytest.mark.parametrize(
    ("last", "fault", "found", "message"),
    [
        ("0.9", "dies", (0.9, 0.8), "at_once: memsaver ended in at_once"),  # a second engine wakes
        ("0.99", "", (0.8, 0.8), "mem_fraction_static 0.99, staged"),  # one alone does not wake
    ],
)
def test_the_largest_fractions_beside_a_failure(run, capsys, last, fault, found, message):
    status, rows, engines = run("--only=fraction", f"--fractions=0.8,{last}", fault=fault)
    row = rows["sglang_max_mem_fraction"]
    assert status == 1 and (row["memsaver"], row["peer_value"]) == found
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


def test_without_the_peer_or_sglang_nothing_is_measured(run, machine, capsys):
    shutil.rmtree(machine / "site" / "torch_memory_saver")
    assert run("--only=cycle") == (2, {}, [])
    assert "torch_memory_saver is not installed" in capsys.readouterr().err


def test_memory_that_stays_in_use_is_a_failure(benchmark_module, machine, monkeypatch):
    processes = benchmark_module("engine_process")
    processes.wait_until_free(1000 - processes.NOISE_MIB)
    monkeypatch.setattr(processes, "FREE_SECONDS", 0)
    with pytest.raises(benchmark_module("children").Failed, match="1000 MiB of the GPU are in use"):
        processes.wait_until_free(500)


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
