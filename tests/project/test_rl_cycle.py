"""Tests benchmarks/rl_cycle.py from end to end, without a GPU and without SGLang."""

import dataclasses
import json
import shutil
import threading
from types import SimpleNamespace

import pytest
from built_sources import built
from repository import TESTS

pytest.importorskip("torch")

FIXTURES = TESTS / "fixtures"
MIB = 1 << 20

ALONE = "memsaver, the engine alone on the GPU"
TRANSITIONS = [
    "engine_sleep",
    "trainer_wake",
    "optimizer_sleep",
    "weights_wake",
    "copy_goes",
    "kv_wake",
]


@pytest.fixture(scope="session")
def nvml():
    """Build the fake NVML and return its path."""
    return built("libnvidia-ml.so.1", [FIXTURES / "nvml" / "nvml.c"])


@pytest.fixture
def memory(benchmark_module, nvml, tmp_path, monkeypatch):
    """Set the device's memory: `memory(total, free)`."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.parent))
    monkeypatch.setattr(benchmark_module("device_memory"), "LIBRARY", str(nvml))
    monkeypatch.setenv("STAND_IN_MEMORY", str(tmp_path / "memory"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def set_to(total, free):
        (tmp_path / "memory.new").write_text(f"{total} {free}")
        (tmp_path / "memory.new").replace(tmp_path / "memory")

    set_to(320 * 10**6, 310 * 10**6)
    return set_to


@pytest.fixture
def run(benchmark_module, memory, nvidia_smi, tmp_path, monkeypatch, warm_children):
    """Run the benchmark; return the status, the rows by metric and compared library, and the
    engines."""
    shutil.copytree(FIXTURES / "sglang_engine", tmp_path / "site")
    shutil.copytree(FIXTURES / "peer", tmp_path / "site", dirs_exist_ok=True)
    monkeypatch.setenv("PYTHONPATH", "site")
    monkeypatch.setenv("STAND_IN_LOG", str(tmp_path / "log"))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark_module("kv_search"), "KEEP", MIB)

    def call(*arguments, fault="", peer=""):
        monkeypatch.setenv("STAND_IN_FAULT", fault)
        monkeypatch.setenv("STAND_IN_PEER", peer)
        cycle = benchmark_module("rl_cycle")
        short = ["--small", "--wait=0", "--touch-gib=0", "--steps=2", "--output=out.json"]
        options = cycle.parser().parse_args([*short, "--states=1", "--bucket-mib=16", *arguments])
        options.device = "cpu"
        status = cycle.run(options)
        path = tmp_path / "out.json"
        rows = json.loads(path.read_text()) if path.exists() else []
        log = tmp_path / "log"
        engines = [line.split()[1] for line in log.read_text().splitlines()]
        return status, {(row["metric"], row["peer"]): row for row in rows}, engines

    return call


# --- seconds and memory ---------------------------------------------------------------------------


@pytest.mark.long
def test_the_rows_of_steps(run, capsys):
    status, rows, engines = run("--only=step")
    assert (status, engines) == (0, ["ours", "theirs", "theirs-retained"])
    retained = rows.pop(("rl_transition_seconds", "torch_memory_saver, retained backup"))
    assert len(retained["detail"]["peer"]) == 2 and retained["ratio"] > 0
    assert set(retained["detail"]["peer_stages"]) == {*TRANSITIONS, "train", "update", "generate"}
    assert {peer for _, peer in rows} == {"torch_memory_saver"}
    by_metric = {metric: row for (metric, _), row in rows.items()}
    stages = [*TRANSITIONS, "train", "update", "generate"]
    assert set(by_metric) == {
        "rl_transition_seconds",
        "rl_peak_GiB",
        *(f"rl_{stage}_ms" for stage in stages),
    }
    for who in ("memsaver", "peer"):
        each = [by_metric[f"rl_{stage}_ms"]["detail"][who] for stage in TRANSITIONS]
        total = by_metric["rl_transition_seconds"]["detail"][who]
        assert total == pytest.approx([sum(s) / 1e3 for s in zip(*each, strict=True)], abs=1e-3)
        assert len(total) == 2 and min(total) > 0

    # In the fake's figures, generating uses the whole engine, and the update the trainer's copy.
    peak = by_metric["rl_peak_GiB"]["detail"]
    for who in ("memsaver_stages", "peer_stages"):
        assert set(peak[who]) == set(stages)
        assert all(0 < value <= 320e6 / 2**30 for values in peak[who].values() for value in values)
        assert min(peak[who]["generate"]) > max(peak[who]["update"]) > max(peak[who]["train"])
    assert by_metric["rl_peak_GiB"]["memsaver"] == max(peak["memsaver_stages"]["generate"])
    assert "memsaver: step 0: engine_sleep" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(("ends", "steps"), [(5, 1), (1, 0)])
def test_a_peer_that_ends_keeps_its_earlier_figures_and_is_marked(run, ends, steps):
    """Each step pauses twice; the first step, which creates the trainer, is not reported."""
    status, rows, _ = run("--only=step", peer=f"ends {ends}")
    assert status == 1
    for metric in ("rl_transition_seconds", "rl_peak_GiB", "rl_kv_wake_ms"):
        row = rows[metric, "torch_memory_saver"]
        assert len(row["detail"]["memsaver"]) == 2
        assert len(row["detail"]["peer"]) == steps
        assert "tms ended in step" in row["detail"]["peer_failed"]
        assert (row["peer_value"] is None) == (row["ratio"] is None) == (steps == 0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"peer": "loses"}, "tms, step 1: lost"),
        ({"fault": "loses"}, "memsaver, step 0: lost the engine's weights: sum"),
        ({"fault": "refuses"}, "the weights were not updated: no such weight"),
        ({"fault": "stale"}, "the update did not change the weights"),
    ],
)
def test_lost_contents_have_no_figures(run, capsys, faults, message):
    status, rows, _ = run("--only=step", **faults)
    assert status == 1 and message in capsys.readouterr().err
    assert bool(rows) == ("peer" in faults)
    for row in rows.values():
        failed = row["detail"]["peer_failed"].replace("tms-retained", "tms")
        assert row["peer_value"] is None and message in failed


def test_a_missing_library_is_an_error_at_once(run, benchmark_module, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_module("device_memory"), "LIBRARY", "libnothing.so.1")
    cycle = benchmark_module("rl_cycle")
    assert cycle.run(cycle.parser().parse_args([])) == 2
    assert "NVML, which reports" in capsys.readouterr().err


@pytest.mark.long
def test_the_overhead_of_whole_steps(run, capsys):
    status, rows, engines = run("--only=overhead", "--train-tokens=32")
    assert (status, engines) == (0, ["ours", "theirs-retained"]), capsys.readouterr().err
    ((metric, peer),) = rows
    assert metric == "rl_step_overhead_seconds" and peer == "torch_memory_saver, retained backup"
    detail = rows[metric, peer]["detail"]
    for who in ("memsaver", "peer"):
        assert len(detail[who]) == len(detail[f"{who}_whole"]) == 2
        assert set(detail[f"{who}_work"]) == {"train", "update", "generate"}
        for spent, whole in zip(detail[who], detail[f"{who}_whole"], strict=True):
            assert 0 < spent < whole


# --- the KV cache ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_largest_kv_caches(run, benchmark_module, capsys):
    status, rows, engines = run("--only=kv")
    assert status == 0, capsys.readouterr().err
    metric = "rl_kv_tokens_fraction"
    assert set(rows) == {
        (metric, ALONE),
        (metric, "torch_memory_saver"),
        (f"{metric}_at_once", ALONE),
    }
    # The sizes that fit on the fake device, within a search's resolution.
    alone = (320 - 10 - 46 - 1 - 4) * 10**6 // 16384
    staged = alone - 2 * 10**6 // 16384  # the trainer's process
    copy = 45_000_000
    detail = rows[metric, ALONE]["detail"]["trials"]
    found = {
        way: max(one["tokens"] for one in trials if "spare_MiB" in one)
        for way, trials in detail.items()
    }
    near = 0.004 * alone + MIB // 16384
    assert alone - near - 1 <= found["alone"] <= alone
    assert staged - near - 1 <= found["staged"] <= staged
    assert 0.74 * alone < found["at once"] < alone - copy // 16384
    row = rows[metric, ALONE]
    assert row["memsaver"] == row["ratio"] == round(found["staged"] / found["alone"], 4) > 0.98
    assert row["peer_value"] == 1.0
    assert rows[f"{metric}_at_once", ALONE]["memsaver"] < 0.85
    assert rows[metric, "torch_memory_saver"]["ratio"] == pytest.approx(1.0, abs=0.005)
    assert engines[0] == "ours" and engines.count("theirs") <= 2 and len(engines) <= 9


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("full", "staged: 11,840 tokens: the weights were not updated: CUDA out of memory"),
        ("refuses", "failed: memsaver, fit False: RuntimeError: the weights were not updated"),
    ],
)
def test_a_want_of_memory_is_an_answer_and_other_errors_are_failures(run, capsys, fault, message):
    status, rows, _ = run("--only=kv", "--kv-seconds=0", fault=fault)
    told = capsys.readouterr().err
    assert (status, rows) == (1, {}) and message in told


@pytest.fixture
def search(benchmark_module):
    """Search from a first trial, if at most `most` tokens fit; return the search."""
    kv_search = benchmark_module("kv_search")

    def go(most, first, hidden=0):
        """Search; the reported spare bytes wrongly include `hidden` bytes that are needed."""
        cell, found = 1 << 20, kv_search.Search(1 << 20)
        tokens = first
        while tokens is not None and len(found.trials) < 20:
            spare = (most - tokens) * cell
            if spare >= 0:
                found.trials.append(kv_search.Trial(tokens, spare=spare + hidden))
            else:
                found.trials.append(kv_search.Trial(tokens, why="no room"))
            tokens = found.proposal()
        return found

    return go


@pytest.mark.parametrize(
    ("most", "first", "hidden"),
    [
        (100_000, 70_000, 0),
        (100_000, 70_000, 3_000 << 20),  # sizes that do not fit are proposed
        (80_000, 100_000, 0),  # the first size does not fit
    ],
)
def test_the_search_finds_the_largest_size(search, most, first, hidden):
    found = search(most, first, hidden)
    assert found.is_settled and len(found.trials) <= (8 if hidden or first > most else 2)
    assert 0.98 * most < found.best.tokens <= most
    if hidden:
        assert found.failing.tokens - found.best.tokens <= 0.004 * found.best.tokens
    assert not search(0, 100).is_settled


def test_the_search_ends_where_engines_take_no_more(benchmark_module):
    kv_search = benchmark_module("kv_search")
    trials = [kv_search.Trial(700, spare=9 << 40), kv_search.Trial(800, spare=8 << 40)]
    found = kv_search.Search(1 << 20, trials)
    assert found.proposal() > 800
    trials.append(kv_search.Trial(800, spare=8 << 40))
    assert found.is_settled


# --- helpers --------------------------------------------------------------------------------------


def test_each_stage_has_its_own_peak(benchmark_module):
    device_memory = benchmark_module("device_memory")
    now, seen = [5], threading.Event()

    def used():
        value = now[0]
        if value == 9:
            seen.set()
        return value

    peaks = device_memory.Peaks(used, interval=0.001)
    with peaks.stage("first"):
        now[0] = 9  # only during the stage: the sampling thread sees it
        assert seen.wait(10)
        now[0] = 2
    assert not any(thread.name == "peaks" for thread in threading.enumerate())
    with pytest.raises(OSError), peaks.stage("second"):
        now[0] = 3
        raise OSError
    assert peaks.stages["first"] == 9 and peaks.stages["second"] == 3


def test_nvml_reports_the_memory_in_use_on_the_visible_gpu(benchmark_module, memory, monkeypatch):
    device_memory = benchmark_module("device_memory")
    memory(1000, 300)
    found = device_memory.DeviceMemory()
    assert (found.total, found.used()) == (1000, 700)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5eed,GPU-1")
    assert device_memory.DeviceMemory().used() == 700
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(RuntimeError, match="nvmlDeviceGetHandleByIndex_v2 of NVML failed"):
        device_memory.DeviceMemory()


def test_buckets_keep_the_order_and_split_nothing(benchmark_module):
    import torch

    buckets = benchmark_module("rl_engine").buckets
    sizes = [3, 3, 3, 10, 1, 8, 1]
    weights = [(str(at), torch.empty(size, dtype=torch.uint8)) for at, size in enumerate(sizes)]
    found = [[tensor.nbytes for _, tensor in part] for part in buckets(weights, 8)]
    assert found == [[3, 3], [3], [10], [1], [8], [1]]
    assert list(buckets([], 8)) == []


@pytest.mark.parametrize("name", ["memsaver", "tms"])
def test_a_trainer_is_deterministic_and_detects_lost_contents(
    benchmark_module, monkeypatch, sim, name
):
    monkeypatch.syspath_prepend(FIXTURES / "peer")
    shape = dataclasses.replace(benchmark_module("engine_model").SMALL, layers=1, vocab=512)
    trainers = [benchmark_module("rl_trainer").Trainer(name, shape, 2, "cpu") for _ in range(2)]
    weights = sum(tensor.nbytes for _, tensor in trainers[0].weights)
    assert trainers[0].bytes == 3 * weights
    for trainer in trainers:
        before = dict(trainer.weights)["lm_head.weight"].clone()
        trainer.train(5)
        assert (dict(trainer.weights)["lm_head.weight"] != before).any()
    first, second = (dict(trainer.weights)["lm_head.weight"] for trainer in trainers)
    assert (first == second).all()
    trainers[0].remember()
    assert trainers[0].lost() == ""
    next(iter(trainers[0]._optimizer.state.values()))["average_1"].view(-1)[3] += 1
    assert "1 of" in trainers[0].lost()


def test_memsavers_trainer_releases_all_its_memory(benchmark_module, sim):
    import memsaver

    model = benchmark_module("engine_model")
    trainer = benchmark_module("rl_trainer").Trainer("memsaver", model.SMALL, 1, "cpu")
    trainer.sleep_optimizer()
    assert memsaver.stats().resident_bytes == pytest.approx(trainer.bytes // 2, rel=0.1)
    trainer.sleep_weights()
    assert memsaver.stats().resident_bytes == 0
    trainer.wake()
    assert trainer.lost() == ""


def test_rows_are_kept_when_a_run_is_ended_from_outside(benchmark_module, tmp_path):
    runs, results = benchmark_module("runs"), benchmark_module("results")

    def measure(options, failures):
        yield results.measurement("first_ms", [1.0], "peer", [2.0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.run([measure], SimpleNamespace(output=tmp_path / "out.json"))
    assert [row["metric"] for row in results.read(tmp_path / "out.json")] == ["first_ms"]


def test_a_fraction_is_not_rounded_up_to_its_goal(benchmark_module):
    row = benchmark_module("parts.rl_kv").measured("rl_kv_tokens_fraction", 0.96961, ALONE, 1.0)
    assert (row["memsaver"], row["ratio"]) == (0.9696, 0.9696)
    assert benchmark_module("report").verdict(row, [row]) == "not met"
