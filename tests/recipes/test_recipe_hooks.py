"""Tests that memsaver's hooks attach to the installed SGLang."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import types

import pytest
from installed import needs_sglang

from memsaver.integrations.engine import hooking
from memsaver.integrations.sglang import handlers, hooks
from memsaver.integrations.sglang.places import LOCAL_CONTROL, has_local_control
from memsaver.integrations.sglang.updaters import updater_of

pytestmark = pytest.mark.recipes

UPDATER = "SchedulerWeightUpdaterManager"
MIXIN = "SchedulerUpdateWeightsMixin"  # older versions' updater

# By purpose, the methods that need hooks, by the class that has them.
METHODS = {
    "release_and_resume": {
        UPDATER: {"release_memory_occupation", "resume_memory_occupation"},
        "TokenizerControlMixin": {"release_memory_occupation", "resume_memory_occupation"},
        "Scheduler": {"get_internal_state"},
    },
    "requests_asleep": {
        "Scheduler": {
            "flush_cache",
            "init_request_dispatcher",
            "init_watch_dog_memory_saver_input_blocker",
        },
        "FanOutCommunicator": {"__call__", "handle_recv"},
        "TokenizerControlMixin": {"init_communicators"},
        "TokenizerManager": {"_handle_abort_finish_reason", "generate_request"},
    },
    "weight_updates": {
        UPDATER: {
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "update_weights_from_tensor",
        },
    },
}


def hooked() -> dict[str, frozenset[str]]:
    """Return the names of the hooked methods, by class."""
    modules = [sys.modules[name] for name in hooks.modules() if name in sys.modules]
    classes = [found for module in modules for found in vars(module).values()]
    return {
        UPDATER if found.__name__ == MIXIN else found.__name__: names
        for found in classes
        if isinstance(found, type) and (names := vars(found).get(hooking.INSTALLED))
    }


@pytest.mark.parametrize("purpose", METHODS)
def test_the_hooks_attach(purpose):
    needs_sglang()
    hooks.install()
    attached = hooked()
    missing = {
        f"{owner}.{name}"
        for owner, names in METHODS[purpose].items()
        for name in names - attached.get(owner, frozenset())
    }
    assert not missing


def test_a_reply_that_reports_states_has_the_outcome(engine, monkeypatch):
    """The reply has SGLang's base class and the fields of SGLang's pull request 24123."""
    from sglang.srt.managers import io_struct

    assert not handlers.reports_states()
    assert not hasattr(handlers.output_of("release", "text", "failed"), "success")
    options = {} if dataclasses.is_dataclass(io_struct.BaseReq) else {"kw_only": True}
    fields = {"success": True, "message": ""}
    namespace = {"__annotations__": {"success": bool, "message": str}, **fields}
    reply = types.new_class(
        "ReplyReqOutput", (io_struct.BaseReq,), options, lambda given: given.update(namespace)
    )
    reply = reply if options else dataclasses.dataclass(reply)
    monkeypatch.setattr(io_struct, "ReleaseMemoryOccupationReqOutput", reply)
    assert handlers.reports_states()
    for trouble in ("", "weights is already released"):
        made = handlers.output_of("release", "text", trouble)
        assert (made.rid, made.success, made.message) == ("text", not trouble, trouble)


def test_the_handlers_are_as_expected(engine):
    assert handlers.is_as_expected(updater_of(engine.scheduler))


@pytest.mark.parametrize("is_local", [True, False])
def test_local_control_broadcasts_are_found(is_local):
    """Newer versions store options that they set automatically only in their runtime context."""
    needs_sglang()
    import recipe_updater
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import ServerArgs

    names = inspect.signature(ServerArgs).parameters
    options = {LOCAL_CONTROL: is_local}
    if "attn_dp_size" in names:
        options.update(attn_dp_size=2, tp_size=2)
    else:
        options.update(enable_dp_attention=True)
    assert options.keys() <= names.keys()
    context = recipe_updater.runtime_context and recipe_updater.runtime_context.get_context()
    scheduler = object.__new__(Scheduler)
    with contextlib.ExitStack() as held:
        scheduler.server_args = types.SimpleNamespace(**options)
        if hasattr(context, "override_server_args"):
            held.enter_context(recipe_updater.published(**options))
            scheduler.server_args = context.server_args
        assert has_local_control(scheduler) == is_local
