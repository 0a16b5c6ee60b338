"""Tests that no call of a `vllm.LLM` leaves locks held or callers recorded."""

from __future__ import annotations

import gc
import signal
import threading
import time
import types

import pytest

from memsaver.errors import InvalidStateError
from memsaver.integrations.engine import held
from memsaver.integrations.engine.errors import EngineTimeoutError
from memsaver.integrations.engine.interface import Request
from memsaver.integrations.vllm import engines
from memsaver.integrations.vllm.engines import LocalEngine

SECONDS = 5.0


def made(**calls) -> LocalEngine:
    """Return the controller's engine for a fake LLM with its engine core in another process."""
    core = types.SimpleNamespace(engine_core=types.SimpleNamespace())
    llm = types.SimpleNamespace(llm_engine=core, generate=lambda: "text", **calls)
    return LocalEngine(llm)


def test_a_call_on_a_thread_of_its_own_cannot_generate_inside_itself():
    engine = made(sleep=lambda: engine.generate())
    with pytest.raises(InvalidStateError, match="another call"):
        engine.call("sleep", {}, SECONDS)
    assert engine.generate() == "text"


def test_a_thread_that_cannot_be_started_leaves_the_engine_usable(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    engine = made(sleep=lambda: "asleep")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            engine.call("sleep", {}, SECONDS)
    assert gc.isenabled()
    assert engine.call("sleep", {}, SECONDS) == "asleep"


def test_a_call_without_a_device_leaves_the_engine_usable(monkeypatch):
    def device():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = made(sleep=lambda: "asleep")
    with monkeypatch.context() as patched:
        patched.setattr(held, "device", device)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.call("sleep", {}, SECONDS)
    assert engine.call("sleep", {}, 0.5) == "asleep"


def test_a_late_generation_is_aborted_after_its_step(monkeypatch):
    aborted = []
    engine = made()
    core = engine._engine
    core.add_request = lambda *_: None
    core.step = lambda: time.sleep(0.3) or []
    core.abort_request = lambda ids, internal=False: aborted.extend(ids)
    core.output_processor = types.SimpleNamespace(has_unfinished_requests=lambda: True)
    for name in ("prompt_of", "sampling_of"):
        monkeypatch.setattr(engines, name, lambda request: None)
    with pytest.raises(EngineTimeoutError):
        engine.samples([Request([1], {}), Request([2], {})], 0.1)
    assert len(aborted) == 2


class InterruptedLock:
    """A lock that a signal interrupts after its acquisition."""

    def __init__(self) -> None:
        self.lock, self.is_interrupted = threading.Lock(), True
        self.locked, self.release = self.lock.locked, self.lock.release

    def acquire(self, timeout):
        assert self.lock.acquire(timeout=timeout)
        if self.is_interrupted:
            signal.raise_signal(signal.SIGINT)
        return True


@pytest.mark.parametrize("name", ["_busy", "_generating"])
def test_an_interrupt_does_not_leave_a_lock_of_its_call(name):
    engine = made(sleep=lambda *_: "asleep")
    lock = InterruptedLock()
    setattr(engine, name, lock)
    with pytest.raises(KeyboardInterrupt):
        engine.call("pause", {"mode": "abort"}, SECONDS)
    assert not lock.locked()
    lock.is_interrupted = False
    assert engine.call("pause", {"mode": "abort"}, SECONDS) == "asleep"


class Interrupted(list):
    """A list that a signal interrupts after each insertion or before each removal."""

    def __init__(self, name: str) -> None:
        self.name = name

    def append(self, value):
        super().append(value)
        if self.name == "append":
            signal.raise_signal(signal.SIGINT)

    def remove(self, value):
        if self.name == "remove":
            signal.raise_signal(signal.SIGINT)
        super().remove(value)


@pytest.mark.parametrize("name", ["append", "remove"])
def test_an_interrupt_does_not_leave_a_record_of_its_call(name):
    engine = made()
    callers = engine._callers = Interrupted(name)
    with pytest.raises(KeyboardInterrupt):
        engine.generate()
    assert not callers
    callers.name = ""
    assert engine.generate() == "text"
