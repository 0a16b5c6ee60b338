"""Tests the HTTP responses of a server whose engine sleeps, with fake endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import types

import pytest
import sleeping_manager
from sleeping_manager import BOTH, GenerateReqInput, Manager, change, outputs

from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.http.asleep_answers import AsleepAnswers
from memsaver.integrations.engine.refusals import asleep_text
from memsaver.integrations.sglang import admissions, http_answers

pytestmark = pytest.mark.usefixtures("manager_modules")


class Server:
    """An application with endpoints in several formats, wrapped in the middleware."""

    def __init__(self, manager) -> None:
        self.manager = manager
        self.user_middleware = []
        http_answers.install(types.SimpleNamespace(_global_state=self, app=self))
        ((kind, arguments),) = self.user_middleware
        self.app = kind(self._serve, **arguments)

    def add_middleware(self, kind, **arguments):
        self.user_middleware.insert(0, (kind, arguments))

    @property
    def tokenizer_manager(self):
        return self.manager

    async def _serve(self, scope, receive, send):
        path = scope["path"]
        if path == "/raises":
            await outputs(self.manager, GenerateReqInput("a"))
        elif path in ("/catches", "/health_generate"):
            is_probe = path == "/health_generate"
            try:
                await outputs(self.manager, GenerateReqInput("HEALTH_CHECK" if is_probe else "a"))
            except Exception:
                await self._answer(send, 200 if is_probe else 500, [b"an error without tags"])
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

    async def get(self, path, root_path=""):
        messages = []

        async def send(message):
            messages.append(message)

        await self.app({"type": "http", "path": path, "root_path": root_path}, None, send)
        starts = [m for m in messages if m["type"] == "http.response.start"]
        assert len(starts) == 1 and messages[0] is starts[0]
        return starts[0]["status"], b"".join(m.get("body", b"") for m in messages[1:])


@pytest.mark.parametrize("path", ["/raises", "/catches", "/stream"])
async def test_every_endpoint_refuses_with_status_503_and_the_tags(path):
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


@pytest.mark.parametrize("path", ["/raises", "/catches", "/stream", "/health_generate"])
async def test_a_request_that_a_release_in_progress_overtakes_is_refused(path):
    """The server records a release only after the schedulers have answered it."""
    server = Server(Manager())
    server.manager.between = lambda: server.manager.tags.update(BOTH)
    status, body = await server.get(path)
    answer = json.loads(body)
    found = answer if path == "/health_generate" else answer["error"]
    assert status == 503 and found["tags"] == list(BOTH)
    assert ("error" in answer) == (path != "/health_generate")


@pytest.mark.parametrize("error", [None, ConnectionResetError("the client disconnected")])
@pytest.mark.parametrize("parts", [(b"a", b"b"), ()])
async def test_an_awake_server_sends_each_part_at_once(error, parts):
    """A stream has no parts if the client disconnects early."""
    sent = []

    async def serve(scope, receive, send):
        assert receive is client
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            assert sent[-1] == part
        if error is not None:
            raise error

    async def send(message):
        sent.append(message.get("body", message.get("status")))

    async def client():
        return {"type": "http.disconnect"}

    admission = admissions.admission_of(Manager())
    app = AsleepAnswers(serve, lambda: admission, lambda: False, ())
    raised = contextlib.nullcontext() if error is None else pytest.raises(type(error))
    with raised:
        await app({"type": "http", "path": "/stream"}, client, send)
    assert sent == [200, *parts]


@pytest.mark.parametrize("path", ["/raises", "/stream"])
async def test_a_request_that_is_sent_again_is_answered_as_usual(policy, path):
    policy("wake")
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


@pytest.mark.parametrize("stream", [False, True])
async def test_the_refusal_of_another_part_of_a_batch_leaves_the_repeated_request(policy, stream):
    """The parts of a batch are refused one by one, some of them after the request was sent
    again.
    """
    policy("wake")
    server = Server(Manager())
    await change(server.manager, "release")
    parts = []

    async def refuse_another():
        text = asleep_text(["kv_cache"], "generate")
        reason = {"type": "abort", "status_code": 503, "message": text}
        output = {"meta_info": {"finish_reason": reason}}
        with contextlib.suppress(EngineAsleepError):
            await admissions.abort_reason(
                sleeping_manager.own_abort_reason, server.manager, output, stream
            )

    def between():
        if not parts:
            server.manager.tags = {"kv_cache"}
            parts.append(asyncio.ensure_future(refuse_another()))

    server.manager.between = between
    status, body = await server.get("/stream" if stream else "/raises")
    assert status == 200 and b"asleep" not in body and parts[0].done()


async def test_other_requests_and_errors_pass_while_asleep():
    server = Server(Manager())
    await change(server.manager, "release")
    assert await server.get("/model_info") == (200, b"fine")
    with pytest.raises(KeyError):
        await server.get("/fails")
    server.manager = None  # before the manager exists
    assert await server.get("/model_info") == (200, b"fine")


@pytest.mark.parametrize("when, status", [("refuse", 503), ("wait", 200), ("wake", 200)])
@pytest.mark.parametrize(
    "path, root",
    [
        ("/health", ""),
        ("/health_generate", ""),
        ("/v/health", "/v"),
        ("/health", "/v"),
        ("/health", "/he"),
    ],
)
async def test_health_reports_a_sleeping_engine_without_generating(
    policy, when, status, path, root
):
    policy(when)
    server = Server(Manager())
    assert await server.get(path, root) == (200, b"fine")
    server.manager.sent.clear()
    await change(server.manager, "release")
    found, body = await server.get(path, root)
    assert found == status and json.loads(body) == {"status": "asleep", "tags": list(BOTH)}
    assert server.manager.tags == set(BOTH) and server.manager.sent == []
    await change(server.manager, "resume")
    assert await server.get(path, root) == (200, b"fine")


async def test_health_queries_the_schedulers_if_other_processes_release_memory():
    server = Server(Manager(tokenizer_worker_num=2))
    server.manager.tags = {"kv_cache"}
    assert (await server.get("/health"))[0] == 503
