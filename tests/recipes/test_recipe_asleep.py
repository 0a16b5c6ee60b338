"""Tests the guard against requests with the request classes of the installed SGLang."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import re
from array import array
from types import SimpleNamespace

import pytest
from installed import needs_sglang

from memsaver.integrations.engine.refusals import asleep_in, asleep_text
from memsaver.integrations.sglang import (
    engines,
    failed_replies,
    guard,
    leftovers,
    places,
    replicas,
)

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
        reply = sent(messages, failed_replies.failed_reply(messages, kind, TEXT))
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


def test_settings_with_which_an_idle_engine_communicates_have_the_known_names(scheduler):
    """If the names differed, communicators that are in use would be suspended."""
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="none")
    assert {name: getattr(arguments, name) for name in leftovers._SILENT} == leftovers._SILENT


def test_communicators_are_not_suspended_if_sglang_enables_the_expert_recorder(
    scheduler, monkeypatch
):
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="none")
    here = SimpleNamespace(server_args=arguments)
    monkeypatch.setattr(leftovers, "guard_of", lambda _: "a guard")
    assert leftovers._is_silent_asleep(here)
    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:  # 0.5.18 and older write such settings into the arguments
        arguments.expert_distribution_recorder_mode = "stat"
    else:  # SGLang makes this call if EPLB is enabled
        declare_resolution(arguments, "a test", expert_distribution_recorder_mode="stat")
    here.server_args = pickle.loads(pickle.dumps(arguments))  # as it is for the scheduler
    assert not leftovers._is_silent_asleep(here)


def test_the_engines_ranks_are_those_that_sglang_chooses(scheduler):
    from sglang.srt.server_args import ServerArgs

    try:
        from sglang.srt.arg_groups.overrides import declare_resolution
    except ImportError:
        pytest.skip("this version of SGLang has no choices apart from its arguments")
    arguments = ServerArgs(model_path="none", dp_size=2, pp_size=2)
    declare_resolution(arguments, "a test", dp_size=1, pp_size=1)
    manager = SimpleNamespace(server_args=arguments)

    async def original(manager, request):
        return "sent"

    assert asyncio.run(replicas._to_all(None)(original, manager, None)) == "sent"
    link = engines.LocalEngine(SimpleNamespace(tokenizer_manager=manager))
    assert [link.arguments(1)[name] for name in ("dp_size", "pp_size")] == [1, 1]
    place = places.place_of(SimpleNamespace(scheduler=manager, tp_cpu_group=None))
    assert (place.size, place.stages) == (1, 1)


def test_generations_reach_their_handlers_through_the_guard(scheduler):
    """`dispatch_unread` guards the last of these callers."""
    callers = {
        name
        for name, function in vars(scheduler).items()
        if inspect.isfunction(function)
        and re.search(r"self\.handle_(generate|embedding)_request\(", inspect.getsource(function))
    }
    assert callers <= {
        "handle_batch_embedding_request",
        "handle_batch_generate_request",
        "_dispatch_tokenized_mm_requests",
    }


def test_a_refusal_reaches_sglangs_server_in_rust(scheduler, messages):
    if not hasattr(scheduler, "send_abort_output"):
        pytest.skip("this version of SGLang has no answers through its server in Rust")
    import msgspec
    from sglang.srt.rust_server.server import RustServer

    frames = []

    def push(header, _):
        frames.append(msgspec.msgpack.decode(header))
        return True

    rust = SimpleNamespace(server=SimpleNamespace(push_decode_result_batch=push))
    rust.push_abort = functools.partial(RustServer.push_abort, rust)
    fake = SimpleNamespace(rust_server=rust)
    fake.send_abort_output = functools.partial(scheduler.send_abort_output, fake)
    made = guard.Guard.__new__(guard.Guard)
    made._messages, made._scheduler, made._logged = messages, fake, set()
    request = SimpleNamespace(rid="a", input_ids=array("q", [1, 2]))
    assert made._refuse("TokenizedGenerateReqInput", request, TEXT) is None
    (((rid,), (reason,), (prompt_tokens,), *_),) = frames
    assert (rid, reason["status_code"], prompt_tokens) == ("a", 503, 2)
    assert asleep_in(reason["message"]).tags == ("weights",)
