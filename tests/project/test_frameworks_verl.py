"""Tests the benchmark of verl's trainer from end to end, without a GPU, verl, Ray or SGLang."""

import json
import math
import signal
from types import SimpleNamespace

import pytest
from built_sources import built
from repository import TESTS

torch = pytest.importorskip("torch")

FIXTURES = TESTS / "fixtures"


@pytest.fixture
def run(benchmark_module, nvidia_smi, tmp_path, monkeypatch):
    """Run scenarios; return the status, the rows by metric, and the folder of the training runs."""
    nvml = built("libnvidia-ml.so.1", [FIXTURES / "nvml" / "nvml.c"])
    monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml.parent))
    (tmp_path / "memory").write_text("320000000 310000000")
    monkeypatch.setenv("STAND_IN_MEMORY", str(tmp_path / "memory"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(FIXTURES / "verl_trainer"))
    library = tmp_path / "torch_memory_saver_hook.so"
    library.write_bytes(bytes(4096))
    monkeypatch.setenv("FAKE_PEER_LIBRARY", str(library))
    part = benchmark_module("parts.frameworks_verl")
    monkeypatch.setattr(part.verl_model, "save", fake_model)
    monkeypatch.setattr(part, "FREE_SECONDS", 10)
    # Its thread outlives the test, so it must not use the fake NVML, which needs the environment.
    memory = SimpleNamespace(used=lambda: 1 << 30)
    monkeypatch.setattr(part, "DeviceMemory", lambda: memory)

    def call(*arguments, fault=""):
        monkeypatch.setenv("FAKE_FAULT", fault)
        frameworks = benchmark_module("frameworks")
        folder = tmp_path / "trainings"
        given = ["--only=verl", f"--output={tmp_path / 'out'}", f"--verl-folder={folder}"]
        options = frameworks.parser().parse_args([*given, *arguments])
        status = frameworks.engine_benchmark.run(frameworks.MEASURES, options, lambda: "")
        path = tmp_path / "out"
        rows = json.loads(path.read_text()) if path.exists() else []
        return status, {row["metric"]: row for row in rows}, folder

    return call


def fake_model(folder, *, small, prompts):
    (folder / "prompts.jsonl").write_text("{}\n" * prompts)


def test_the_rows_of_a_training(run):
    status, rows, _ = run("--verl-steps=3")
    assert status == 0
    assert set(rows) == {
        "verl_sleep_wake_seconds",
        "verl_step_seconds",
        "verl_update_weights_seconds",
        "verl_peak_MiB",
        "verl_kv_tokens",
    }
    cycles = rows["verl_sleep_wake_seconds"]["detail"]
    assert len(cycles["memsaver"]) == len(cycles["peer"]) == 3  # without the one before step 1
    steps = rows["verl_step_seconds"]
    assert steps["detail"]["memsaver"] == [0.2, pytest.approx(0.3)]
    assert steps["detail"]["peer_phases"]["gen"] == [0.05] * 3
    assert steps["detail"]["differences"] == []
    assert rows["verl_kv_tokens"]["memsaver"] == 4096
    assert {row["peer"] for row in rows.values()} == {"torch_memory_saver"}


@pytest.mark.parametrize(
    ("fault", "status", "count"),
    [("differs", 1, 2), ("random", 0, 3)],
)
def test_a_difference_counts_unless_the_peer_differs_from_itself(run, capsys, fault, status, count):
    found, rows, folder = run("--verl-steps=2", fault=fault)
    assert found == status
    assert len(list(folder.glob("tms-*"))) == 2  # the peer trains once more
    if fault == "differs":
        assert rows == {}
        expected = "step 2: critic/score/mean 2.0, 1.5', 'step 2: responses"
        assert expected in capsys.readouterr().err
    else:
        detail = rows["verl_step_seconds"]["detail"]
        assert len(detail["differences"]) >= count
        assert len(detail["differences_of_the_peer"]) >= count


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("far", "critic/score/mean differs by 0.999, in two runs of the peer by 0.001"),
        ("stale", "training/rollout_probs_diff_mean is 0.01, with torch_memory_saver 3e-06"),
    ],
)
def test_a_difference_must_be_as_small_as_the_peers(run, capsys, fault, message):
    """Two runs with the compared library also differ from each other."""
    status, rows, _ = run("--verl-steps=2", fault=fault)
    assert (status, rows) == (1, {})
    assert message in capsys.readouterr().err


def test_a_training_that_has_ended_is_not_repeated(run, benchmark_module, monkeypatch, capsys):
    """The first run is interrupted after the first of three training runs."""
    part = benchmark_module("parts.frameworks_verl")
    wait = part.Trainer.wait

    def cut_off(trainer, seconds):
        if trainer.name == "tms":
            raise part.Failed("cut off")
        return wait(trainer, seconds)

    monkeypatch.setattr(part.Trainer, "wait", cut_off)
    assert run("--verl-steps=2", fault="random")[:2] == (1, {})
    monkeypatch.setattr(part.Trainer, "wait", wait)
    status, rows, _ = run("--verl-steps=2", fault="random")
    assert status == 0 and "verl_step_seconds" in rows
    said = capsys.readouterr().err
    assert said.count("memsaver: training with verl") == 1
    assert said.count("tms: training with verl") == 3
    found = part.results.stamp()
    monkeypatch.setattr(part.results, "stamp", lambda: {**found, "gpu": "another"})
    assert run("--verl-steps=2", "--no-peer")[0] == 0
    assert capsys.readouterr().err.count("memsaver: training with verl") == 1


def test_a_benchmark_that_is_terminated_ends_its_trainer(run, benchmark_module, monkeypatch):
    part = benchmark_module("parts.frameworks_verl")
    trainers = []

    def wait(trainer, seconds):
        trainers.append(trainer)
        assert trainer._process.poll() is None and trainer.left()
        signal.raise_signal(signal.SIGTERM)

    def unexpected(*_):
        raise AssertionError("the benchmark did not handle the signal")

    monkeypatch.setattr(part.Trainer, "wait", wait)
    before = signal.signal(signal.SIGTERM, unexpected)
    try:
        with pytest.raises(SystemExit) as caught:
            run("--verl-steps=2", fault="hangs")
        assert signal.getsignal(signal.SIGTERM) is unexpected
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 128 + signal.SIGTERM
    (trainer,) = trainers
    assert trainer._process.poll() is not None and not trainer.left()


def test_an_engine_with_another_saver_is_a_failure_without_rows(run, capsys):
    status, rows, _ = run("--verl-steps=2", fault="saver")
    assert status == 1 and rows == {}
    assert "the engines do not use memsaver" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "compared"),
    [("--peer", ("torch_memory_saver", 0.0)), ("--no-peer", ("the largest allowed value", 64.0))],
)
def test_cycles_measure_the_memory_in_use_asleep(run, given, compared):
    status, rows, _ = run("--verl-only=cycles", "--verl-cycles=7", given)
    row = rows["verl_cycles_change_MiB"]
    assert (status, row["memsaver"]) == (0, 0.0)
    assert (row["peer"], row["peer_value"]) == compared


@pytest.mark.parametrize(("fault", "ours"), [("", 0.7), ("crowded", 0.65)])
def test_the_largest_fraction_is_the_last_that_works(run, fault, ours):
    given = ("--verl-only=fractions", "--verl-fractions", "0.7", "0.6", "0.65")
    status, rows, _ = run(*given, fault=fault)
    assert status == 0
    row = rows["verl_max_fraction"]
    assert (row["memsaver"], row["peer_value"]) == (ours, 0.7)


def test_an_interrupted_trainer_and_one_that_raises_end_with_an_error(run, capsys):
    status, rows, _ = run("--verl-only=interrupted", fault="hangs")
    assert status == 0 and rows["verl_left_MiB"]["detail"]["memsaver"] == [0, 0]
    text = capsys.readouterr().err
    assert "interrupted: ended with status" in text and "KeyboardInterrupt" in text
    assert "raises: ended with status 1" in text and "this reward was to fail" in text


def test_a_process_that_outlives_its_trainer_is_a_failure(
    run, benchmark_module, monkeypatch, capsys
):
    part = benchmark_module("parts.frameworks_verl")
    monkeypatch.setattr(part, "FREE_SECONDS", 2)
    monkeypatch.setattr(part.Trainer, "left", lambda trainer: [1 << 30])
    monkeypatch.setattr(part.Trainer, "__exit__", lambda trainer, *_: trainer._log.close())
    status, rows, _ = run("--verl-only=interrupted", fault="hangs")
    assert (status, rows) == (1, {})
    assert capsys.readouterr().err.count(f"processes running: [{1 << 30}]") == 2


def test_the_reward_is_the_share_of_even_words(benchmark_module, monkeypatch):
    reward = benchmark_module("verl_reward")
    assert reward.compute_score("", "t2 t3 t10 t11", "") == 0.5
    assert reward.compute_score("", "", "") == 0.0
    monkeypatch.setenv(reward.FAILURE, "2")
    with pytest.raises(RuntimeError, match="was to fail"):
        reward.compute_score("", "t2", "")


@pytest.mark.parametrize("wrong", range(3))
def test_a_figure_that_is_not_a_number_is_a_difference(benchmark_module, wrong):
    runs = [[{"loss": 1.0}, {"loss": 2.0}] for _ in range(3)]
    runs[wrong] = [{"loss": 1.0}, {"loss": math.nan}]
    (found,) = benchmark_module("training_differences").larger(*runs, ["loss"])
    assert "loss differs by" in found
