"""Test the guard against requests with the request classes of the installed SGLang."""

from __future__ import annotations

import inspect
import re

import pytest
from installed import needs_sglang

from memsaver.integrations.engine.refusals import asleep_in, asleep_text
from memsaver.integrations.sglang import guard

pytestmark = pytest.mark.recipes

TEXT = asleep_text({"weights"}, "do it")


@pytest.fixture(scope="module")
def scheduler():
    needs_sglang()
    from sglang.srt.managers.scheduler import Scheduler

    return Scheduler


@pytest.fixture
def messages(scheduler):
    from sglang.srt.managers import io_struct

    return io_struct


def sent(messages, message):
    """Return the message as the tokenizer manager receives it."""
    if not hasattr(messages, "msgpack_encode"):  # older versions pickle their messages
        return message
    return messages.msgpack_decode(messages.msgpack_encode(message))


def test_every_request_is_known_to_the_guard(scheduler):
    source = inspect.getsource(scheduler.init_request_dispatcher)
    kinds = set(re.findall(r"\(\s*(\w*Req\w*)\s*,", source))
    assert {"TokenizedGenerateReqInput", "FlushCacheReqInput"} <= kinds
    assert kinds <= guard._PASSING | guard._NEEDS.keys() | {guard._CONTINUE, "RpcReqInput"}


def test_every_control_request_has_a_reply_that_can_be_sent(scheduler, messages):
    kinds = [kind for kind in guard._NEEDS if not kind.startswith(("Tokenized", "Batch"))]
    kinds = [kind for kind in [*kinds, "RpcReqInput"] if hasattr(messages, kind)]
    assert len(kinds) > 8
    for kind in kinds:
        reply = sent(messages, guard._failed(messages, kind, TEXT))
        text = getattr(reply, "message", getattr(reply, "error_message", None))
        has_text = kind not in ("GetWeightsByNameReqInput", "ClearHiCacheReqInput")
        assert not has_text or asleep_in(text) is not None, reply
        assert getattr(reply, "success", False) is False, reply


def test_an_aborted_generation_can_be_sent(scheduler, messages):
    made = guard.Guard.__new__(guard.Guard)
    made._messages = messages
    reply = sent(messages, made._aborted(TEXT, "a"))
    reason = reply.finished_reason
    assert (reply.rid, reason["type"], reason["status_code"]) == ("a", "abort", 503)
    assert asleep_in(reason["message"]).tags == ("weights",)
