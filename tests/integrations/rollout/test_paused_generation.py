"""Tests that generation resumes on all engines if it could not be paused on some of them."""

import threading

import pytest
from weight_engine import Backend, checkpoint

from memsaver.integrations.engine.errors import EngineDiedError, EngineError
from memsaver.integrations.rollout import EngineSet, RolloutEngine, engine_set
from memsaver.integrations.rollout.weights import update
from memsaver.integrations.rollout.weights.options import Options
from memsaver.integrations.rollout.weights.pauses import paused_generation
from memsaver.integrations.rollout.weights.update_steps import UpdateSteps


class Generating(Backend):
    """An engine that generates unless it is paused.

    Attributes:
        paused: whether generation is paused.
        pause_error: the error that a pause raises after it has taken effect, or None.
        continue_error: the error that is raised instead of continuing.
        answers: an event; a pause returns or raises once it is set.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self.paused, self.pause_error, self.continue_error = False, None, None
        self.answers = threading.Event()
        self.answers.set()

    def pause_generation(self, mode, timeout):
        self.paused = True
        assert self.answers.wait(30)
        if self.pause_error is not None:
            raise self.pause_error

    def continue_generation(self, timeout):
        if self.continue_error is not None:
            raise self.continue_error
        self.paused = False


@pytest.fixture
def backends():
    return [Generating() for _ in range(3)]


def pausing(backends):
    """Return a context manager that pauses a set of engines for an update."""
    engines = EngineSet([RolloutEngine(one, timeout=20) for one in backends])
    options = Options(None, "whole", None, 1, "off", None, "abort", None, 20.0)
    return paused_generation(engines, UpdateSteps(engines), options)


def refused(backends, kind=EngineError):
    """Check that a set of engines cannot be paused; return the error's message."""
    with pytest.raises(kind) as caught, pausing(backends):
        raise AssertionError("the block ran")
    return str(caught.value)


def test_engines_of_a_set_continue_if_one_cannot_pause(backends):
    backends[1].pause_error = EngineError("it is busy")
    text = refused(backends)
    assert text.startswith("engine 2 of 3: it is busy; nothing was sent"), text
    assert text.endswith("; generation continues on all engines"), text
    assert not any(one.paused for one in backends)
    backends[1].pause_error = None
    with pausing(backends):
        assert all(one.paused for one in backends)
    assert not any(one.paused for one in backends)


def test_engines_that_can_neither_pause_nor_continue_are_named(backends):
    backends[1].pause_error = EngineDiedError("its process ended")
    backends[1].continue_error = EngineDiedError("its process ended")
    text = refused(backends, EngineDiedError)
    expected = "may still be paused on engines that could not continue (engine 2 of 3: its process"
    assert f"{expected} ended)" in text
    assert text.count("engine 2 of 3") == 2 and text.endswith("call continue_generation()"), text
    assert [one.paused for one in backends] == [False, True, False]


def test_an_engine_that_is_still_pausing_is_named_and_continues(backends, monkeypatch):
    monkeypatch.setattr(engine_set, "END_SECONDS", 0.2)
    backends[0].pause_error = EngineError("it is busy")
    backends[2].answers.clear()
    text = refused(backends)
    assert "engine 1 of 3: it is busy; engine 3 of 3: the engine did not answer in time" in text
    assert not any(one.paused for one in backends)
    backends[2].answers.set()


def test_engines_that_do_not_continue_after_an_update_are_named(backends):
    backends[2].continue_error = EngineError("it is busy")
    with pytest.raises(EngineError) as caught, pausing(backends):
        pass
    text = str(caught.value)
    assert text.startswith("engine 3 of 3: it is busy; the weights were updated"), text
    assert [one.paused for one in backends] == [False, False, True]


@pytest.mark.parametrize("continues", [True, False])
def test_an_engine_whose_pause_fails_continues(manager_backend, continues):
    """The pause might have taken effect, for example before its timeout."""
    engine = RolloutEngine(manager_backend, timeout=20)
    manager_backend.pause_error = EngineError("no answer")
    manager_backend.continue_error = None if continues else RuntimeError("no connection")
    with pytest.raises(EngineError, match="no answer; nothing was sent") as caught:
        update(engine, checkpoint(), pause="abort")
    text = str(caught.value)
    assert manager_backend.paused != continues and "load" not in manager_backend.calls
    assert ("generation continues on all engines" in text) == continues, text
    expected = "may still be paused on engines that could not continue (no connection)"
    assert (expected in text) != continues


@pytest.fixture
def manager_backend(monkeypatch):
    import weight_engine

    with weight_engine.hooked(monkeypatch) as kind:
        yield Generating(kind)


def test_engines_of_a_mesh_continue_if_one_cannot_pause(run_ranks):
    run_ranks(2)("""
engine, backend = engine_of(1)
paused = []
def pause(mode, timeout):
    paused.append(mode)
    if fails and RANK == 1:
        raise EngineError("it is busy")
def go_on(timeout):
    if fails == 2 and RANK == 1:
        raise EngineError("it hangs")
    paused.clear()
backend.pause_generation, backend.continue_generation = pause, go_on
for fails in (1, 2):
    error = refusals.refused(EngineError, update, engine, checkpoint(), pause="abort")
    texts = gathered(str(error), dist.group.WORLD)
    assert len(set(texts)) == 1 and list(error.failures) == [1], texts
    assert "pausing generation (engine 1) failed on rank 1 of 2" in texts[0], texts[0]
    assert bool(paused) == (fails == 2 and RANK == 1), texts[0]
    if fails == 1:
        assert texts[0].endswith("nothing was sent; generation continues on all engines"), texts[0]
    else:
        assert "that could not continue (engine 1: it hangs): call" in texts[0], texts[0]
    assert "load" not in backend.calls
fails = 0
update(engine, checkpoint(), pause="abort")
assert holds(backend) and not paused
# An interrupt of a pause is raised only on its own rank.
if RANK == 1:
    backend.pause_generation = lambda *given: (_ for _ in ()).throw(KeyboardInterrupt())
with pytest.raises((KeyboardInterrupt, RankError)) as caught:
    update(engine, checkpoint(), pause="abort")
assert caught.type is (KeyboardInterrupt if RANK else RankError) and not paused
assert RANK or "generation continues on all engines" in str(caught.value)
""")
