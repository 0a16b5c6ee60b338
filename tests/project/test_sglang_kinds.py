"""Tests benchmarks/sglang_kinds.py and the table generated from its rows, without a GPU."""

from __future__ import annotations

import json

import pytest
from repository import ROOT

ONE, OTHER = [[5, 6, 7]], [[8, 9, 10]]
CYCLE = {"release_ms": 3.0, "resume_ms": 2.0, "released_MiB": {"kv_cache": 4}}


def _steps(start, other, **changed):
    steps = {"start": start, "cycle": start, "update": other, "restore": start}
    return {
        step: {"output": changed.get(step, output), **(CYCLE if step == "cycle" else {})}
        for step, output in steps.items()
    }


def _verdicts(kinds, backed, plain, name="dense"):
    kind = next(kind for kind in kinds.KINDS if kind.name == name)
    row = kinds.judged(kind, backed, plain)
    return tuple(row.get(key) for key in kinds.VERDICTS)


@pytest.fixture
def kinds(benchmark_module):
    return benchmark_module("sglang_kinds")


@pytest.mark.parametrize(
    ("backed", "plain", "expected"),
    [
        ({}, {}, ("same", "same", "same")),
        ({"cycle": OTHER}, {}, ("differs", "same", "same")),
        ({"update": ONE}, {}, ("same", "differs", "same")),
        ({"restore": OTHER}, {}, ("same", "differs", "same")),
        ({}, {"update": OTHER}, ("same", "same", "differs")),
        ({}, {"restore": ONE}, ("same", "same", "differs")),
        ({"update": ONE}, {"update": OTHER}, ("same", "differs", "differs")),
    ],
)
def test_a_changed_output_differs(kinds, backed, plain, expected):
    found = _verdicts(kinds, _steps(ONE, OTHER, **backed), _steps(OTHER, ONE, **plain))
    assert found == expected


def test_a_step_that_was_not_reached_failed_and_the_row_has_its_error(kinds):
    backed = _steps(ONE, OTHER)
    del backed["update"], backed["restore"]
    backed["error"] = {"step": "update", "text": "it ended", "log": ""}
    assert _verdicts(kinds, backed, _steps(OTHER, ONE)) == ("same", "failed", "same")
    row = kinds.judged(kinds.KINDS[0], backed, _steps(OTHER, ONE))
    assert row["errors"] == {"with_backup": backed["error"]}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ("same", "same", "same")),
        ({"update": ONE}, ("same", "differs", "same")),
        ({"restore": ONE}, ("same", "differs", "same")),
        ({"awake_update": [[2]]}, ("same", "failed", "same")),
        ({"awake_update": None}, ("same", "failed", "same")),
    ],
)
def test_updates_are_compared_with_those_of_the_awake_engine_if_sglangs_differ(
    kinds, changed, expected
):
    def reloaded(start, other, **changed):
        awake = {"awake_update": [[1]], "awake_restore": [[2]], "update": [[1]], "restore": [[2]]}
        outputs = {**awake, **changed}
        return {**_steps(start, other), **{name: {"output": o} for name, o in outputs.items()}}

    backed, plain = reloaded(ONE, OTHER, **changed), reloaded(OTHER, ONE)
    assert _verdicts(kinds, backed, plain, "fp8_reload") == expected


def test_kinds_that_cannot_be_updated_are_only_resumed(kinds):
    backed = {step: {"output": ONE, **CYCLE} for step in ("start", "cycle")}
    assert _verdicts(kinds, backed, {}, "w8a8_fp8") == ("same", None, None)


def test_outputs_after_a_pause_count_as_resumed(kinds):
    paused = {"refused": "", "tokens": 3}
    backed = _steps(ONE, OTHER)
    backed |= {mode: {"output": ONE, **paused} for mode in kinds.MODES}
    assert _verdicts(kinds, backed, _steps(OTHER, ONE), "pause")[0] == "same"
    backed["retract"] = {"output": OTHER, **paused}
    assert _verdicts(kinds, backed, _steps(OTHER, ONE), "pause")[0] == "differs"


def test_a_kind_that_was_not_run_keeps_its_earlier_row(kinds, tmp_path):
    file = kinds.File(tmp_path / "rows.json")
    skipped = {"name": "dense", "gpus": 1, "resumed": "not run", "why": "no time was left"}
    file.add(skipped)
    assert json.loads((tmp_path / "rows.json").read_text()) == [skipped]
    file.add({"name": "dense", "gpus": 1, "resumed": "same"})
    file.add(skipped)
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["resumed"] == "same" and row["date"]


def test_kinds_without_their_gpus_are_recorded_as_not_run(kinds, tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "gpus", lambda: 0)
    output = tmp_path / "rows.json"
    assert (
        kinds.run(kinds.parser().parse_args(["--only", "dense,tp2", "--output", str(output)])) == 0
    )
    rows = {row["name"]: row["why"] for row in json.loads(output.read_text())}
    assert rows == {"dense": "needs 1 GPUs", "tp2": "needs 2 GPUs"}


def test_an_engine_that_fails_at_its_end_is_a_failure(kinds, tmp_path, monkeypatch):
    error = {"step": "stop", "text": "it did not end", "log": ""}
    row = {"name": "dense", "gpus": 1, "resumed": "same", "errors": {"with_backup": error}}
    monkeypatch.setattr(kinds, "gpus", lambda: 1)
    monkeypatch.setattr(kinds, "measure", lambda kind, folder: dict(row))
    output = tmp_path / "rows.json"
    options = kinds.parser().parse_args(["--only", "dense", "--output", str(output)])
    assert kinds.run(options) == 1


def test_a_failed_engine_ends_with_the_last_exception_of_its_log(kinds, tmp_path, monkeypatch):
    """The child process starts, and fails because SGLang is missing."""
    monkeypatch.setattr(kinds, "environment", lambda name: {})
    steps = kinds.run_engine(kinds.KINDS[0], True, tmp_path / "engine")
    assert set(steps) == {"error"} and steps["error"]["step"] == "start"


def test_the_table_is_the_result_file(benchmark_module):
    page = benchmark_module("sglang_kinds_page")
    rows = page.results.read(page.RESULTS)
    there = (ROOT / "docs" / "sglang.md").read_text()
    assert page.rewritten(there, rows) == there, "make pages"


class FakeTieredEngine:
    """A fake cache with a tier in host memory, for one engine's greedy output.

    Args:
        keeps: the released tags that do not make the host tier lose its prefixes.
        wrong: the released tags that make the output wrong.
    """

    def __init__(self, keeps, wrong=()):
        self.keeps, self.wrong, self.seen, self.is_wrong = keeps, wrong, [], False

    def sleep(self, tags, wait_idle):
        if tags not in self.keeps:
            self.seen = []
        self.is_wrong = tags in self.wrong

    def wake_up(self):
        pass

    def generate(self, input_ids, sampling_params):
        hits = len(input_ids) if input_ids in self.seen else 0
        self.seen.append(input_ids)
        details = {"cached_tokens": hits, "cached_tokens_details": {"device": 0, "host": hits}}
        return {"output_ids": [hits, self.is_wrong], "meta_info": details}


@pytest.mark.parametrize(
    ("keeps", "wrong", "found"),
    [
        (["weights", None], (), (1500, 1500)),
        (["weights"], (), (1500, 0)),
        ([], (), "does not hold the prompt after a release of weights"),
        (["weights"], [None], "after a release of None"),
    ],
)
def test_a_prefix_in_the_host_tier_is_hit_or_dropped(
    benchmark_module, monkeypatch, keeps, wrong, found
):
    cls = benchmark_module("sglang_kind_worker").KindWorker
    worker = cls.__new__(cls)
    worker.controller = FakeTieredEngine(keeps, wrong)
    monkeypatch.setattr(cls, "_settle", lambda self: None)
    monkeypatch.setattr(cls, "_output", lambda self: ONE)
    if isinstance(found, str):
        with pytest.raises(RuntimeError, match=found):
            worker.tier()
        return
    result = worker.tier()
    assert (result["weights"], result["all"]) == found and result["output"] == ONE


def test_a_host_tier_that_was_not_measured_is_a_failure(kinds):
    backed = _steps(ONE, OTHER)
    assert _verdicts(kinds, backed, _steps(OTHER, ONE), "hicache")[0] == "failed"
    backed["tier"] = {"weights": 1499, "all": 0, "output": ONE}
    assert _verdicts(kinds, backed, _steps(OTHER, ONE), "hicache")[0] == "same"
