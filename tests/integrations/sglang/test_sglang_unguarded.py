"""Tests schedulers in which memsaver cannot refuse requests that need released memory."""

from __future__ import annotations

import logging
import re
import sys

import fake_sglang
import pytest
from scheduler_calls import ask, states

from memsaver.integrations.sglang import hooks, unguarded
from memsaver.integrations.sglang.protocol import answers_of


@pytest.fixture(params=["0.5.23", "0.5.12"])
def version(request):
    return request.param


def reports_state(engine):
    """Return whether the scheduler reports memsaver's state, as it does if it has a guard."""
    return "memsaver" in engine.get_internal_state(None).internal_state


@pytest.mark.parametrize("value, then", [("0", "released only"), ("1", "released nevertheless")])
def test_an_unexpected_scheduler_is_logged_and_starts(sglang, monkeypatch, caplog, value, then):
    monkeypatch.setenv("MEMSAVER_SGLANG_UNGUARDED", value)
    io_struct = __import__("sglang.srt.managers.io_struct", fromlist=["_"])
    monkeypatch.delattr(io_struct, "AbortReq")
    with caplog.at_level(logging.ERROR, "memsaver.sglang"):
        scheduler = sglang.Scheduler(sglang.Updater)
    assert "cannot protect a sleeping engine from requests" in caplog.text
    assert caplog.text.count("memory is") == 1 and f"memory is {then}" in caplog.text
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
    """Install the hooks in a class that lacks a method whose hook precedes the guard's hook."""
    scheduler = sys.modules["sglang.srt.managers.scheduler"]
    members = {"init_request_dispatcher": lambda scheduler: None}
    patch.setattr(scheduler, "Scheduler", kind := type("Scheduler", (), members))
    with pytest.raises(AttributeError):
        hooks.install_in(scheduler)
    patch.setattr(type(engine), unguarded.FAILED, getattr(kind, unguarded.FAILED), raising=False)


@pytest.mark.parametrize(
    "unguard, reason",
    [
        (without_a_message, "AttributeError: .*AbortReq"),
        (without_the_place, "Scheduler.init_request_dispatcher was not found"),
        (without_a_required_method, "AttributeError: .*get_internal_state"),
    ],
)
@pytest.mark.parametrize("tags", [None, ["kv_cache"]])
def test_memory_is_released_without_a_guard_only_if_a_variable_allows_it(
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


class Reply:
    """A reply without fields, so it cannot contain memsaver's answer."""


@pytest.mark.parametrize(
    "lacking, replies",
    [
        (("tp_cpu_group",), True),
        (("tp_cpu_group", "offload_tags"), False),
        (("ReleaseMemoryOccupationReqOutput",), False),
    ],
)
def test_unexpected_handlers_release_memory_without_a_guard_only_if_a_variable_says_so(
    engine, monkeypatch, caplog, lacking, replies
):
    without_a_message(engine, monkeypatch)
    request = fake_sglang.ReleaseMemoryOccupationReqInput(tags=["kv_cache"])

    def release():
        return hooks.scheduler.release(lambda *given: given, engine.handlers, request)

    with monkeypatch.context() as patch:
        for name in lacking:
            if name.endswith("Output"):
                patch.setattr(f"sglang.srt.managers.io_struct.{name}", Reply)
            else:
                patch.delattr(engine.handlers, name)
        output = release()
        if replies:
            (answer,) = answers_of([output])
            assert answer.failure.kind == "ConfigError" and answer.released == ()
            assert "MEMSAVER_SGLANG_UNGUARDED=1" in answer.failure.message
        else:
            assert output is None and "its sender receives no reply" in caplog.text
        patch.setenv("MEMSAVER_SGLANG_UNGUARDED", "1")
        assert release()[1] is request
