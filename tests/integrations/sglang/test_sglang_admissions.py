"""Test requests to a sleeping engine in the tokenizer manager and in its server, with fakes."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
import types
from dataclasses import asdict, dataclass

import pytest

import memsaver
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.messages import Answer, Failure, SchedulerState
from memsaver.integrations.engine.refusals import asleep_text
from memsaver.integrations.sglang import admissions, http_answers, tokenizer
from memsaver.integrations.sglang.protocol import text_of

BOTH = ("kv_cache", "weights")


class HTTPException(Exception):
    """FastAPI's class, whose arguments differ from memsaver's errors."""

    def __init__(self, status_code, detail=None, headers=None):
        self.status_code, self.detail, self.headers = status_code, detail, headers


@dataclass
class ResumeMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass
class GenerateReqInput:
    rid: str
    stream: bool = False
    is_single: bool = True


@dataclass
class EmbeddingReqInput(GenerateReqInput):
    pass


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    fastapi = types.ModuleType("fastapi")
    fastapi.HTTPException = HTTPException
    monkeypatch.setitem(sys.modules, "fastapi", fastapi)
    messages = types.ModuleType("sglang.srt.managers.io_struct")
    messages.ResumeMemoryOccupationReqInput = ResumeMemoryOccupationReqInput
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, messages.__name__, messages)


class Manager:
    """A tokenizer manager with one scheduler, which refuses requests without memory."""

    def __init__(self, **arguments) -> None:
        self.server_args = types.SimpleNamespace(
            **{"enable_memory_saver": True, "enable_weights_cpu_backup": True, **arguments}
        )
        self.tags: set[str] = set()
        self.rid_to_state: dict[str, object] = {}
        self.failure: Failure | None = None
        self.between = lambda: None  # called between the admission and the scheduler
        self.sent: list[object] = []
        self.aborted: list[str] = []
        self.number = 0

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state(self):
        state = SchedulerState("s", tuple(self.tags), True)
        return [{"memsaver": asdict(state)}]

    async def _change(self, operation, obj):
        await asyncio.sleep(0)
        self.number += 1
        tags = set(obj.tags or BOTH)
        if self.failure is None:
            self.tags = self.tags | tags if operation == "release" else self.tags - tags
        answer = Answer(
            "s", operation, tuple(tags), tuple(self.tags), (), (), self.failure, self.number
        )
        return [types.SimpleNamespace(rid=text_of(answer))]

    async def release_memory_occupation_communicator(self, obj):
        return await self._change("release", obj)

    async def resume_memory_occupation_communicator(self, obj):
        return await self._change("resume", obj)

    def abort_request(self, rid):
        self.aborted.append(rid)

    async def generate_request(self, obj, request=None):
        """SGLang's own method, whose scheduler has the guard."""
        obj.rid = f"{obj.rid}'"  # it changes the request
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


async def own_abort_reason(manager, output, is_stream):
    """SGLang's own method."""
    if not is_stream:
        raise HTTPException(503, output["meta_info"]["finish_reason"]["message"])
    return output


def run(work):
    return asyncio.run(asyncio.wait_for(work, 30))


async def outputs(manager, obj, request=None):
    found = admissions.generate(Manager.generate_request, manager, obj, request)
    return [output async for output in found]


async def update(manager, obj="weights"):
    hook = admissions.call("update its weights", reads=False)
    return await hook(Manager.update_weights_from_tensor, manager, obj)


def change(manager, operation, tags=None):
    hook = {"release": tokenizer.request_release, "resume": tokenizer.request_resume}[operation]
    return hook(manager, types.SimpleNamespace(tags=tags))


@pytest.fixture
def policy(monkeypatch):
    def chosen(when, seconds=5):
        monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP", when)
        monkeypatch.setenv("MEMSAVER_SGLANG_ASLEEP_WAIT", str(seconds))

    return chosen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", [GenerateReqInput, EmbeddingReqInput])
def test_a_refused_request_raises_before_it_is_sent(kind, stream):
    async def test():
        manager = Manager()
        await change(manager, "release")
        with pytest.raises(EngineAsleepError) as caught:
            await outputs(manager, kind("a", stream))
        assert caught.value.tags == BOTH and caught.value.status_code == 503
        assert ("embeddings" in str(caught.value)) == (kind is EmbeddingReqInput)
        assert caught.value.detail == str(caught.value) and manager.sent == []
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), again.tags, str(again)) == (
            type(caught.value),
            BOTH,
            str(caught.value),
        )
        await change(manager, "resume")
        assert len(await outputs(manager, kind("b", stream))) == (3 if stream else 1)

    run(test())


def test_a_refusal_by_the_scheduler_raises_the_same_error():
    async def test():
        manager = Manager()
        manager.tags = {"kv_cache"}  # released by another process
        with pytest.raises(EngineAsleepError) as caught:
            await outputs(manager, GenerateReqInput("a"))
        assert caught.value.tags == ("kv_cache",)
        # A stream has SGLang's own format, because it may have begun.
        manager = Manager()
        manager.tags = {"kv_cache"}
        (output,) = await outputs(manager, GenerateReqInput("a", stream=True))
        assert output["meta_info"]["finish_reason"]["status_code"] == 503

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["wait", "wake"])
def test_a_request_that_a_release_overtakes_is_sent_again(policy, when, stream):
    policy(when)

    async def test():
        manager = Manager()
        await change(manager, "release")
        if when == "wait":
            await change(manager, "resume")
        overtaken = []

        def between():
            if not overtaken:
                overtaken.append(1)
                manager.tags = {"kv_cache"}
                if when == "wait":
                    loop = asyncio.get_running_loop()
                    loop.call_later(0.05, lambda: loop.create_task(change(manager, "resume")))

        manager.between = between
        found = await outputs(manager, GenerateReqInput("a", stream))
        assert [output["text"] for output in found] == (["0", "1", "2"] if stream else ["0"])
        assert len(manager.sent) == 2 and overtaken

    run(test())


def test_a_request_is_held_until_a_resume(policy):
    policy("wait")

    async def test():
        manager = Manager()
        await change(manager, "release")
        tasks = [
            asyncio.ensure_future(outputs(manager, GenerateReqInput(str(number))))
            for number in range(4)
        ]
        updating = asyncio.ensure_future(update(manager))
        await asyncio.sleep(0.05)
        assert manager.sent == []
        await change(manager, "resume", ["weights"])
        assert (await updating)[0] is True and manager.sent == ["weights"]
        await change(manager, "resume")
        await asyncio.gather(*tasks)
        assert [obj.rid for obj in manager.sent[1:]] == ["0'", "1'", "2'", "3'"]

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waited_too_long_is_refused(policy, stream):
    policy("wait", 0.05)

    async def test():
        manager = Manager()
        await change(manager, "release")
        with pytest.raises(EngineAsleepError, match="no caller woke it up"):
            await outputs(manager, GenerateReqInput("a", stream))
        with pytest.raises(EngineAsleepError, match="no caller woke it up"):
            await update(manager)

    run(test())


def test_a_request_wakes_the_engine(policy):
    policy("wake")

    async def test():
        manager = Manager()
        await change(manager, "release")
        assert await update(manager) == (True, "Success")
        assert manager.tags == {"kv_cache"}
        assert await outputs(manager, GenerateReqInput("a"))
        assert manager.tags == set()

    run(test())


def test_a_wake_up_without_memory_is_the_requests_error(policy):
    policy("wake", 0.1)

    async def test():
        manager = Manager()
        await change(manager, "release")
        manager.failure = Failure("OutOfDeviceMemoryError", "8 MiB are needed", "kv_cache", 8, 1)
        with pytest.raises(EngineAsleepError, match="8 MiB are needed") as caught:
            await outputs(manager, GenerateReqInput("a"))
        assert isinstance(caught.value.__cause__, memsaver.OutOfDeviceMemoryError)
        assert manager.tags == set(BOTH)
        manager.failure = None
        assert await outputs(manager, GenerateReqInput("b"))

    run(test())


def test_weights_without_a_backup_are_not_woken_for_a_generation(policy):
    policy("wake")

    async def test():
        manager = Manager(enable_weights_cpu_backup=False)
        await change(manager, "release")
        with pytest.raises(EngineAsleepError, match="weights has no backup"):
            await outputs(manager, GenerateReqInput("a"))
        assert (await update(manager))[0] is True

    run(test())


@pytest.mark.parametrize("when", ["wait", "wake"])
def test_a_health_check_neither_waits_nor_wakes(policy, when):
    policy(when)

    async def test():
        manager = Manager()
        await change(manager, "release")
        with pytest.raises(EngineAsleepError):
            await outputs(manager, GenerateReqInput("HEALTH_CHECK_1"))
        assert manager.tags == set(BOTH)

    run(test())


def test_nothing_is_refused_without_a_memory_saver():
    async def test():
        manager = Manager(enable_memory_saver=False)
        await change(manager, "release")
        manager.tags.clear()  # such a release has no effect
        assert await outputs(manager, GenerateReqInput("a"))
        assert (await update(manager))[0] is True

    run(test())


def test_an_update_that_fails_otherwise_is_returned():
    async def test():
        manager = Manager()

        async def failing(manager, obj):
            return False, "the model does not use a.weight"

        hook = admissions.call("update its weights", reads=False)
        assert await hook(failing, manager, "x") == (False, "the model does not use a.weight")
        manager.tags = {"weights"}
        with pytest.raises(EngineAsleepError, match="cannot update its weights"):
            await update(manager)

    run(test())


# --- the server -----------------------------------------------------------------------------------


class Server:
    """An application with endpoints in several formats, behind the middleware."""

    def __init__(self, manager) -> None:
        self.manager = manager
        self.app = http_answers.AsleepAnswers(self._serve, lambda: self.manager)

    async def _serve(self, scope, receive, send):
        path = scope["path"]
        if path == "/raises":
            await outputs(self.manager, GenerateReqInput("a"))
        elif path == "/catches":
            try:
                await outputs(self.manager, GenerateReqInput("a"))
            except Exception:
                await self._answer(send, 500, [b"an error without tags"])
                return
        elif path == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            async for output in admissions.generate(
                Manager.generate_request, self.manager, GenerateReqInput("a", stream=True)
            ):
                body = json.dumps(output).encode()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
            return
        elif path == "/fails":
            raise KeyError("a bug")
        await self._answer(send, 200, [b"fi", b"ne"])

    async def _answer(self, send, status, parts):
        await send({"type": "http.response.start", "status": status, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def get(self, path):
        messages = []

        async def send(message):
            messages.append(message)

        await self.app({"type": "http", "path": path}, None, send)
        starts = [m for m in messages if m["type"] == "http.response.start"]
        assert len(starts) == 1 and messages[0] is starts[0]
        return starts[0]["status"], b"".join(m.get("body", b"") for m in messages[1:])


@pytest.mark.parametrize("path", ["/raises", "/catches", "/stream"])
def test_a_refusal_is_status_503_with_the_tags_in_every_endpoint(path):
    async def test():
        server = Server(Manager())
        status, body = await server.get(path)
        assert status == 200
        await change(server.manager, "release")
        status, body = await server.get(path)
        answer = json.loads(body)
        assert status == 503 and answer["error"]["tags"] == list(BOTH)
        assert answer["error"]["type"] == "engine_asleep" and answer["error"]["code"] == 503
        assert answer["success"] is False and "asleep" in answer["message"]
        await change(server.manager, "resume")
        assert (await server.get(path))[0] == 200

    run(test())


@pytest.mark.parametrize("path", ["/raises", "/stream"])
def test_a_request_that_is_sent_again_is_answered_as_usual(policy, path):
    policy("wake")

    async def test():
        server = Server(Manager())
        await change(server.manager, "release")
        overtaken = []

        def between():
            if not overtaken:
                overtaken.append(1)
                server.manager.tags = {"kv_cache"}

        server.manager.between = between
        status, body = await server.get(path)
        assert status == 200 and b"asleep" not in body and overtaken

    run(test())


def test_other_requests_and_errors_pass_while_asleep():
    async def test():
        server = Server(Manager())
        await change(server.manager, "release")
        assert await server.get("/model_info") == (200, b"fine")
        with pytest.raises(KeyError):
            await server.get("/fails")
        server.manager = None  # before it exists
        assert await server.get("/model_info") == (200, b"fine")

    run(test())


@pytest.mark.parametrize("when, status", [("refuse", 503), ("wait", 200), ("wake", 200)])
@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_health_reports_a_sleeping_engine_without_generating(policy, when, status, path):
    policy(when)

    async def test():
        server = Server(Manager())
        assert await server.get(path) == (200, b"fine")
        await change(server.manager, "release")
        found, body = await server.get(path)
        assert found == status and json.loads(body) == {"status": "asleep", "tags": list(BOTH)}
        assert server.manager.tags == set(BOTH) and server.manager.sent == []
        await change(server.manager, "resume")
        assert await server.get(path) == (200, b"fine")

    run(test())


def test_health_asks_the_schedulers_if_other_processes_release_memory():
    async def test():
        server = Server(Manager(tokenizer_worker_num=2))
        server.manager.tags = {"kv_cache"}
        assert (await server.get("/health"))[0] == 503

    run(test())
