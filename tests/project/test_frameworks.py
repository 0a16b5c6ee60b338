"""Tests benchmarks/frameworks.py without a GPU and without the frameworks."""

import json

import pytest

CALLS = [["sleep", 0.1], ["wake weights", 0.02], ["wake kv_cache", 0.03]]

# Stands for the workers, in the children: FAKE_LOSSES are the last losses of the runs, by name.
WORKER = f"""
import json, os
from pathlib import Path

class Fake:
    imports = ()
    def __init__(self, name, model, **settings):
        self.name, self.steps = name, settings["steps"]
    def train(self):
        log = Path(os.environ["FAKE_LOG"])
        runs = log.read_text().split() if log.exists() else []
        log.write_text(" ".join([*runs, self.name]))
        losses = json.loads(os.environ["FAKE_LOSSES"]).get(self.name, [1.0])
        last = losses[min(runs.count(self.name), len(losses) - 1)]
        step = {{"loss": 1.0, "reward": 0.5, "grad_norm": 2.0, "responses": "x", "seconds": 1.0}}
        step |= {{"transitions": 0.5, "asleep_MiB": 100.0}}
        slow = 1 if self.name == "memsaver" else 4
        calls = [[name, seconds * slow] for name, seconds in {CALLS}] * self.steps
        return {{
            "start": 1.0,
            "steps": [step] * (self.steps - 1) + [{{**step, "loss": last}}],
            "calls": [*calls, ["sleep", 9.0]],
            "peak_MiB": 1000.0 * slow,
            "profiles": ["sleep: a profile"] if os.environ.get("FAKE_PROFILE") else [],
        }}
"""


@pytest.fixture
def run(benchmark_module, nvidia_smi, tmp_path, monkeypatch):
    """Run the benchmark; return the status, the rows by metric, and the names of the runs."""
    (tmp_path / "fake_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    frameworks = benchmark_module("frameworks")
    monkeypatch.setattr(frameworks, "find_spec", lambda module: module)
    monkeypatch.setattr(benchmark_module("framework_model"), "save", lambda options: None)
    for part in ("frameworks_trl", "frameworks_trainer"):
        monkeypatch.setattr(benchmark_module(f"parts.{part}"), "WORKER", "fake_worker:Fake")

    def call(*arguments, losses=None):
        monkeypatch.setenv("FAKE_LOSSES", json.dumps(losses or {}))
        options = frameworks.parser().parse_args([f"--output={tmp_path / 'out'}", *arguments])
        options.device = "cpu"
        status = frameworks.run(options)
        path = tmp_path / "out"
        rows = json.loads(path.read_text()) if path.exists() else []
        return status, {row["metric"]: row for row in rows}, (tmp_path / "log").read_text().split()

    return call


def test_the_rows_of_trl(run):
    status, rows, runs = run("--only=trl")
    assert (status, runs) == (0, ["memsaver", "vllm"])
    values = {metric: (row["memsaver"], row["peer_value"]) for metric, row in rows.items()}
    assert values == {
        "trl_sleep_wake_seconds": (0.15, 0.6),
        "trl_sleep_wake_later_seconds": (0.15, 0.6),
        "trl_step_seconds": (1.0, 1.0),
        "trl_peak_MiB": (1000.0, 4000.0),
    }
    assert len(rows["trl_sleep_wake_later_seconds"]["detail"]["memsaver"]) == 4
    assert rows["trl_step_seconds"]["detail"]["differences"] == []


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        ({"memsaver": [2.0], "vllm": [1.0]}, 1),  # the peer repeats its losses
        ({"memsaver": [2.0], "vllm": [1.0, 3.0]}, 0),  # it does not
        ({"memsaver": [9.0], "vllm": [1.0, 1.5]}, 1),  # nor does it, but its losses are closer
    ],
)
def test_other_losses_than_the_peers_need_a_peer_that_differs_from_itself(run, losses, status):
    found, rows, runs = run("--only=trl", losses=losses)
    assert (found, runs) == (status, ["memsaver", "vllm", "vllm"])
    assert bool(rows) == (status == 0)
    if rows:
        (difference,) = rows["trl_step_seconds"]["detail"]["differences"]
        assert difference == "step 5: loss 2.0, 1.0"


def test_the_rows_of_the_trainer(run):
    status, rows, runs = run("--only=trainer")
    assert (status, runs) == (0, ["memsaver", "moves", "resident"])
    assert set(rows) == {
        f"trainer_{name}"
        for name in ("transition_seconds", "step_seconds", "asleep_MiB", "peak_MiB")
    }
    assert len(rows["trainer_step_seconds"]["detail"]["memsaver"]) == 4


@pytest.mark.parametrize("name", ["memsaver", "moves"])
def test_other_losses_than_the_resident_trainers_are_a_failure(run, capsys, name):
    status, rows, _ = run("--only=trainer", losses={name: [3.0]})
    assert (status, rows) == (1, {})
    assert f"trainer, {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("calls", "seconds"),
    [
        ([], []),
        ([*CALLS, *CALLS], [0.15, 0.15]),
        ([*CALLS, ["sleep", 9.0]], [0.15]),  # of the last step, whose wake-up never came
        ([["wake weights", 1.0]], None),
        ([["sleep", 1.0], ["sleep", 1.0]], None),
    ],
)
def test_a_cycle_is_a_sleep_and_its_wake_ups(benchmark_module, calls, seconds):
    part = benchmark_module("parts.frameworks_trl")
    if seconds is None:
        with pytest.raises(benchmark_module("children").Failed, match="TRL"):
            part.cycles_of(calls)
    else:
        assert part.cycles_of(calls) == seconds


ROW = {"bench": "frameworks", "memsaver": 0.5, "peer": "other", "peer_value": 1.0, "ratio": 2.0}
ROW |= {"gpu": "Some GPU", "date": "2026-01-01", "versions": {"verl": "1"}}


def test_a_value_that_was_measured_once_is_marked(benchmark_module):
    row = ROW | {"metric": "m", "detail": {"memsaver": [0.5], "peer": [1.0, 1.0]}}
    tables = benchmark_module("framework_tables")
    table = tables.table([row], "frameworks", [("m", "a step")], lambda value, _: str(value))
    assert "| a step | 0.5 (once) | other | 1.0 | 2.00 |" in table


def test_numbers_of_tokens_are_whole(benchmark_module):
    figure = benchmark_module("readme_table").figure
    assert figure(309964.0, "verl_kv_tokens") == "309,964"
    assert figure(1234.56, "vllm_decode_tokens_per_s") == "1,234.6"


def test_a_metric_without_a_row_is_named_until_it_has_one(benchmark_module, tmp_path):
    tables = benchmark_module("framework_tables")
    figure = benchmark_module("readme_table").figure
    page = tmp_path / "verl.md"
    text = tables.pages([], tmp_path, figure)[page]
    assert text.startswith(tables.NOT_MEASURED) and "| memsaver |" not in text
    assert "- two GPUs: a step\n" in text
    row = ROW | {"metric": "verl_tp2_step_seconds"}
    row["detail"] = {"memsaver_phases": {"step": [9.0, 1.0]}, "peer_phases": {"step": [9.0, 2.0]}}
    row["detail"] |= {"differences": []}
    text = tables.pages([row], tmp_path, figure)[page]
    assert "- two GPUs: a step\n" not in text
    assert "- two GPUs: update with both resumes\n" in text


def test_phases_are_means_without_the_first_step(benchmark_module, tmp_path):
    tables = benchmark_module("framework_tables")
    ours = {"step": [9.0, 2.0, 4.0], "adv": [5.0, 0.0, 0.0], "gen": [8.0, 1.0, 2.0]}
    theirs = {"step": [9.0, 6.0, 6.0], "adv": [5.0, 0.0, 0.0], "gen": [8.0, 3.0, 4.5]}
    detail = {"memsaver_phases": ours, "peer_phases": theirs}
    detail |= {"differences": ["step 1: responses"], "differences_of_the_peer": ["a", "b"]}
    row = ROW | {"metric": "verl_step_seconds", "detail": detail}
    text = tables.phases([row], tables.PAGES["verl.md"])
    assert text.splitlines()[4:7] == [
        "| `gen` | 1.500 | 3.750 | 2.50 |",
        "| `adv` | 0.000 | 0.000 |  |",
        "| `step` | 3.000 | 6.000 | 2.00 |",
    ]
    assert "mean seconds of steps 2 to 3, on Some GPU, 2026-01-01 (verl 1)" in text
    assert "Of the 12 compared results" in text
    assert "1 differ from those with other, and 2 differ between two training runs" in text


def test_prompts_have_equal_lengths_and_their_words_repeat(benchmark_module):
    model = benchmark_module("framework_model")
    prompts = [prompt.split() for prompt in model.prompts(600)]
    assert {len(words) for words in prompts} == {model.PROMPT}
    assert len({words[0] for words in prompts[:400]}) == 400 and prompts[0] in prompts[1:]
    assert model.reward([2, 4, 5, 7]) == 0.5 and model.reward([]) == 0
