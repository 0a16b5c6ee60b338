"""Test the updater of SGLang 0.5.13, which has its scheduler's methods but not the scheduler."""

from __future__ import annotations

import pytest
import scheduler_calls
import sglang_stand_in as stand_in
from scheduler_calls import states

from memsaver.integrations.sglang import handlers, scheduler
from memsaver.integrations.sglang.protocol import answers_of


class Unowned:
    """An updater without the attribute `scheduler`."""

    def __init__(self, updater):
        object.__setattr__(self, "_updater", updater)

    def __getattr__(self, name):
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self._updater, name)

    def __setattr__(self, name, value):
        setattr(self._updater, name, value)


@pytest.fixture
def engine(monkeypatch, sim, tag, make_blocks):
    tag.names.extend(stand_in.TAGS)
    with stand_in.modules(monkeypatch) as classes:
        made = classes.Scheduler(classes.Updater)
        scheduler_calls.hold(made, make_blocks)
        yield made
        scheduler_calls.let_go(made)


def ask(engine, operation, tags=None):
    name = f"{operation}_memory_occupation"
    hook = getattr(scheduler, operation)
    kind = stand_in.ReleaseMemoryOccupationReqInput
    output = hook(
        lambda updater, request: getattr(stand_in.Updater, name)(updater._updater, request),
        Unowned(engine.weight_updater),
        kind(tags=tags),
    )
    (answer,) = answers_of([output])
    return answer


def test_release_and_resume_are_protected(engine, sim):
    assert handlers.is_as_expected(Unowned(engine.weight_updater))
    assert ask(engine, "resume").failure is None  # would end an engine without the hook
    first, second = ask(engine, "release"), ask(engine, "release", ["weights"])
    assert sim.tag_bytes() == 0 and second.failure is None
    assert (second.scheduler, second.number) == (first.scheduler, first.number + 1)
    ask(engine, "resume")
    assert set(states().values()) == {"mapped"} and engine.model.is_intact()


def test_an_updater_without_bound_methods_gets_no_hooks(engine):
    engine.weight_updater.is_fully_idle = lambda: True
    assert not handlers.is_as_expected(Unowned(engine.weight_updater))
