"""A fake of SGLang's tokenizer manager; its scheduler rejects requests while tags are released."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import types
from dataclasses import asdict, dataclass

import pytest
from fake_sglang.messages import (
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
)

from memsaver.integrations.engine.messages import Answer, Failure, SchedulerState
from memsaver.integrations.engine.refusals import asleep_text
from memsaver.integrations.sglang import admissions, hooks, tokenizer
from memsaver.integrations.sglang.protocol import REWRITTEN, text_of

BOTH = ("kv_cache", "weights")


class HTTPException(Exception):
    """FastAPI's exception class, whose arguments differ from those of memsaver's errors."""

    def __init__(self, status_code, detail=None, headers=None):
        self.status_code, self.detail, self.headers = status_code, detail, headers


@dataclass
class GenerateReqInput:
    rid: str
    stream: bool = False
    is_single: bool = True


@dataclass
class EmbeddingReqInput(GenerateReqInput):
    pass


@dataclass
class GetInternalStateReq:
    rid: str | None = None


@contextlib.contextmanager
def modules():
    """Install fake FastAPI and SGLang modules for the block."""
    fastapi = types.ModuleType("fastapi")
    fastapi.HTTPException = HTTPException
    messages = types.ModuleType("sglang.srt.managers.io_struct")
    for kind in (
        GetInternalStateReq,
        ReleaseMemoryOccupationReqOutput,
        ResumeMemoryOccupationReqInput,
        ResumeMemoryOccupationReqOutput,
    ):
        setattr(messages, kind.__name__, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fastapi", fastapi)
        for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, messages.__name__, messages)
        yield


def choose(monkeypatch, when, seconds=5):
    """Set the policy for requests that arrive while the engine sleeps."""
    monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP", when)
    monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP_WAIT", str(seconds))


class Manager:
    """A tokenizer manager with one scheduler, which rejects requests while tags are released."""

    def __init__(self, **arguments) -> None:
        self.server_args = types.SimpleNamespace(
            **{"enable_memory_saver": True, "enable_weights_cpu_backup": True, **arguments}
        )
        self.tags: set[str] = set()
        self.lost: set[str] = set()
        self.rid_to_state: dict[str, object] = {}
        self.failure: Failure | None = None
        self.between = lambda: None  # called between the admission and the scheduler
        self.sent: list[object] = []
        self.asked: list[str | None] = []  # the names of queries through the communicator
        self.aborted: list[str] = []
        self.number = 0

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, obj):
        self.asked.append(obj.rid)

    async def get_internal_state(self):
        state = SchedulerState("s", tuple(self.tags), True, lost=tuple(self.lost))
        return [{"memsaver": asdict(state)}]

    async def _change(self, operation, obj):
        await asyncio.sleep(0)
        self.number += 1
        tags = set(obj.tags or BOTH)
        if self.failure is None:
            kept = (
                self.server_args.enable_weights_cpu_backup
                and getattr(obj, "rid", None) != REWRITTEN
            )
            if operation == "release" and not kept:
                self.lost |= {"weights"} & tags - self.tags
            self.tags = self.tags | tags if operation == "release" else self.tags - tags
            if not self.tags:
                self.lost.clear()
        answer = Answer(
            "s", operation, tuple(tags), tuple(self.tags), (), (), self.failure, self.number
        )
        return [types.SimpleNamespace(rid=text_of(answer))]

    async def release_memory_occupation_communicator(self, obj):
        return await self._change("release", obj)

    async def resume_memory_occupation_communicator(self, obj):
        return await self._change("resume", obj)

    def abort_request(self, rid="", abort_all=False):
        self.aborted.append(rid)

    async def generate_request(self, obj, request=None):
        """SGLang's method, with a scheduler that has memsaver's guard."""
        obj.rid = f"{obj.rid}'"  # SGLang changes the request's id
        self.rid_to_state[obj.rid] = object()
        await asyncio.sleep(0)
        self.between()
        self.sent.append(obj)
        if self.tags:
            self.rid_to_state.pop(obj.rid)
            text = asleep_text(self.tags, "generate")
            reason = {"type": "abort", "status_code": 503, "message": text}
            output = {"meta_info": {"finish_reason": reason}}
            aborted = await admissions.abort_reason(own_abort_reason, self, output, obj.stream)
            yield aborted
            return
        for number in range(3 if obj.stream else 1):
            yield {"text": str(number), "meta_info": {"finish_reason": None}}

    async def update_weights_from_tensor(self, obj, request=None):
        self.between()
        if "weights" in self.tags:
            return False, asleep_text(self.tags, "update its weights")
        self.sent.append(obj)
        return True, "Success"


def hooked():
    """Return a manager class with the plugin's hooks."""
    module = types.ModuleType("sglang.srt.managers.tokenizer_manager")
    module.TokenizerManager = type("TokenizerManager", (Manager,), {})
    hooks.install_in(module)
    return module.TokenizerManager


async def own_abort_reason(manager, output, is_stream):
    """SGLang's own method."""
    if not is_stream:
        raise HTTPException(503, output["meta_info"]["finish_reason"]["message"])
    return output


async def outputs(manager, obj, request=None):
    found = admissions.generate(Manager.generate_request, manager, obj, request)
    return [output async for output in found]


async def update(manager, obj="weights"):
    hook = admissions.call("update its weights", reads=False)
    return await hook(Manager.update_weights_from_tensor, manager, obj)


def change(manager, operation, tags=None, rid=None):
    hook = {"release": tokenizer.request_release, "resume": tokenizer.request_resume}[operation]
    return hook(manager, types.SimpleNamespace(tags=tags, rid=rid))


async def asleep(**arguments):
    """Return a manager whose memory has been released."""
    manager = Manager(**arguments)
    await change(manager, "release")
    return manager
