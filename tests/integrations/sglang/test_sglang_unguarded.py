"""Tests schedulers in which memsaver cannot refuse requests that need released memory."""

from __future__ import annotations

import logging
import re
import sys

import pytest
from scheduler_calls import ask, states

from memsaver.integrations.sglang import guard, hooks


@pytest.fixture(params=["0.5.23", "0.5.12"])
def version(request):
    return request.param


def reports_state(engine):
    """Return whether a controller learns the scheduler's state, and that requests are refused."""
    return "memsaver" in engine.get_internal_state(None).internal_state


def test_an_unexpected_scheduler_is_logged_and_starts(sglang, monkeypatch, caplog):
    io_struct = __import__("sglang.srt.managers.io_struct", fromlist=["_"])
    monkeypatch.delattr(io_struct, "AbortReq")
    with caplog.at_level(logging.ERROR, "memsaver.sglang"):
        scheduler = sglang.Scheduler(sglang.Updater)
    assert "cannot protect a sleeping engine from requests" in caplog.text
    assert scheduler._request_dispatcher == scheduler._dispatch


def without_a_message(engine, patch):
    with patch.context() as inner:
        inner.delattr("sglang.srt.managers.io_struct.AbortReq")
        engine.init_request_dispatcher()


def without_the_place(engine, patch):
    """Install the hooks again, as if SGLang had no method for the guard's hook."""
    patch.setattr(hooks, "_GUARDED", f"{hooks._SCHEDULER}.no_method")
    hooks.install_in(sys.modules["sglang.srt.managers.scheduler"])


def without_a_required_method(engine, patch):
    """Install the hooks in a class in which the installation fails before the guard's hook."""
    scheduler = sys.modules["sglang.srt.managers.scheduler"]
    patch.setattr(scheduler, "Scheduler", kind := type("Scheduler", (), {}))
    with pytest.raises(AttributeError):
        hooks.install_in(scheduler)
    patch.setattr(type(engine), guard.FAILED, getattr(kind, guard.FAILED), raising=False)


@pytest.mark.parametrize(
    "unguard, reason",
    [
        (without_a_message, "AttributeError: .*AbortReq"),
        (without_the_place, "Scheduler.init_request_dispatcher was not found"),
        (without_a_required_method, "Scheduler.init_request_dispatcher was not found"),
    ],
)
@pytest.mark.parametrize("tags", [None, ["kv_cache"]])
def test_memory_is_released_without_a_guard_only_if_a_variable_says_so(
    engine, monkeypatch, unguard, reason, tags
):
    assert reports_state(engine)
    unguard(engine, monkeypatch)
    assert not reports_state(engine)
    answer = ask(engine, "release", tags)
    assert answer.failure.kind == "ConfigError"
    found = rf"\({reason}.*\).* MEMSAVER_SGLANG_UNGUARDED=1; nothing has changed"
    assert re.search(found, answer.failure.message)
    assert answer.released == () and set(states().values()) == {"mapped"}
    assert engine.flushed == 0 and engine.model.is_intact()
    monkeypatch.setenv("MEMSAVER_SGLANG_UNGUARDED", "1")
    assert ask(engine, "release", tags).failure is None
    assert states()["kv_cache"] == "paused"
