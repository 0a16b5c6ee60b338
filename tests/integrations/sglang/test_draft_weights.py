"""Tests that a draft model keeps its weights during a sleep and that no other copy remains."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import scheduler_calls
import torch
from simulated_driver import Block

from memsaver.integrations.sglang import draft_weights
from memsaver.integrations.sglang.adapter import MemsaverAdapter

MIB = 1 << 20


def test_only_regions_of_a_draft_model_are_kept(monkeypatch):
    monkeypatch.setattr(draft_weights, "_kept", [])
    seen = []

    def load(runner):
        seen.append([draft_weights.placed(tag, False) for tag in ("weights", "kv_cache")])
        if runner.fails:
            raise ValueError

    draft_weights.load(load, SimpleNamespace(is_draft_worker=False, fails=False))
    draft_weights.load(load, SimpleNamespace(is_draft_worker=True, fails=False))
    with pytest.raises(ValueError):
        draft_weights.load(load, SimpleNamespace(is_draft_worker=True, fails=True))
    draft_weights.load(load, SimpleNamespace(fails=False))  # a runner of another kind
    other = ("kv_cache", False)
    main, draft = [("weights", False), other], [("weights", True), other]
    assert seen == [main, draft, draft, main]


def test_a_draft_models_own_tag_is_released_with_the_weights_and_kept(sim, tag):
    tag.names.extend(("weights", "weights\x1fnone", "weights\x1fhost"))
    saver = MemsaverAdapter()
    with saver.region("weights"):
        main = Block(sim, 4 * MIB, 1)
    with saver.region("weights_drafter"):
        draft = Block(sim, 2 * MIB, 2)
    saver.pause("weights")
    saver.pause("weights_drafter")
    assert sim.tag_bytes() == 0
    saver.resume("weights_drafter")
    saver.resume("weights")
    assert draft.is_intact() and main.is_zero()


@pytest.fixture
def scheduler(engine, monkeypatch):
    monkeypatch.setattr(draft_weights, "_kept", [True])
    return engine


def test_sglangs_own_copy_of_the_draft_model_is_deleted(scheduler):
    updater = scheduler.weight_updater
    updater.stashed_draft_model_state = {"tensors": [("weight", torch.ones(2))]}
    assert scheduler_calls.ask(scheduler, "release").failure is None
    assert updater.stashed_draft_model_state is None


def test_a_copy_that_memsaver_has_no_backup_for_remains(scheduler, monkeypatch):
    monkeypatch.setattr(draft_weights, "_kept", [])
    updater = scheduler.weight_updater
    updater.stashed_draft_model_state = copy = {"tensors": [("weight", torch.ones(2))]}
    scheduler_calls.ask(scheduler, "release")
    assert updater.stashed_draft_model_state is copy


def test_a_request_for_the_draft_models_tag_alone_does_nothing(scheduler):
    before = scheduler_calls.states()
    for operation in ("release", "resume"):
        answer = scheduler_calls.ask(scheduler, operation, ["weights_drafter"])
        assert answer.failure is None and scheduler_calls.states() == before
    answer = scheduler_calls.ask(scheduler, "release", ["weights", "weights_drafter"])
    assert answer.released == ("weights",)
