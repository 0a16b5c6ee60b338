"""HTTP responses of a sleeping SGLang server: status 503 with the released tags, and its health.

`AsleepAnswers` is a middleware of SGLang's server that does nothing while all memory is mapped.
SGLang's endpoints report errors in several formats, some of them inside a stream that begins with
status 200. While memory is released, the middleware therefore delays the start of each response
until the first part of its body, and replaces the response if the request was refused.

`/health` and `/health_generate` normally generate a token. While memory is released they report the
released tags instead, with the status that a load balancer expects: 503 if requests are refused,
and 200 if they wait or wake the engine.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from types import ModuleType
from typing import Any

from ..engine.admission import Admission
from ..engine.errors import EngineAsleepError
from ..engine.policies import WhenAsleep
from ..engine.tags import RELEASE_ORDER
from .admissions import Refusal, admission_of, refusal_here

__all__ = ["ERROR_TYPE", "AsleepAnswers", "install"]

ERROR_TYPE = "engine_asleep"  # in the body's error
_HEALTH = ("/health", "/health_generate")
_HEALTH_STATUS: dict[WhenAsleep, HTTPStatus] = {
    "refuse": HTTPStatus.SERVICE_UNAVAILABLE,
    "wait": HTTPStatus.OK,
    "wake": HTTPStatus.OK,
}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def install(module: ModuleType) -> None:
    """Add the middleware to SGLang's server module, before the server starts.

    It is the innermost one, so its responses get the headers of the server's own (CORS), and a
    request without a valid key gets none of them.

    Raises:
        AttributeError: the module does not have the expected interface.
    """
    module._global_state  # noqa: B018
    all_middleware = module.app.user_middleware  # the outermost first
    module.app.add_middleware(AsleepAnswers, manager=lambda: _manager_of(module))
    all_middleware.append(all_middleware.pop(0))


def _manager_of(module: ModuleType) -> Any:
    return getattr(module._global_state, "tokenizer_manager", None)


class AsleepAnswers:
    """The middleware; see the description of this module.

    Args:
        app: the application that serves the requests.
        manager: returns SGLang's tokenizer manager; None before it exists.
    """

    def __init__(self, app: App, manager: Callable[[], Any]) -> None:
        self._app = app
        self._manager = manager

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        admission = self._admission() if scope["type"] == "http" else None
        if admission is None:
            return await self._app(scope, receive, send)
        if scope["path"] in _HEALTH and await self._is_asleep(admission):
            return await _answer(
                send,
                _HEALTH_STATUS[admission.policy.when_asleep],
                {"status": "asleep", "tags": _in_order(admission.released)},
            )
        if not admission.released:
            return await self._app(scope, receive, send)
        return await self._held_back(scope, receive, send)

    def _admission(self) -> Admission | None:
        manager = self._manager()
        return None if manager is None else admission_of(manager)

    async def _is_asleep(self, admission: Admission) -> bool:
        """Return whether memory is released. Query the engine if others may have changed it."""
        if admission.released or admission.policy.sleep_after or self._has_siblings():
            await admission.refresh()
        return bool(admission.released)

    def _has_siblings(self) -> bool:
        """Return whether other processes of the server also release and resume memory."""
        workers = getattr(self._manager().server_args, "tokenizer_worker_num", 1)
        return isinstance(workers, int) and workers > 1

    async def _held_back(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = Refusal()
        response = _Response(send, refusal)
        token = refusal_here.set(refusal)
        try:
            await self._app(scope, receive, response.send)
        except Exception:
            if refusal.error is None or response.has_begun:
                raise
        finally:
            refusal_here.reset(token)
        await response.end()


class _Response:
    """A response whose start is delayed until the first part of its body.

    Attributes:
        has_begun: whether the start was sent.
    """

    def __init__(self, send: Send, refusal: Refusal) -> None:
        self._send = send
        self._refusal = refusal
        self._start: Message | None = None
        self.has_begun = False

    async def send(self, message: Message) -> None:
        if self.has_begun:
            return await self._send(message)
        if message["type"] == "http.response.start":
            self._start = message
            return None
        if self._refusal.error is not None:  # `end` replaces the response
            return None
        self.has_begun = True
        if self._start is not None:
            await self._send(self._start)
        return await self._send(message)

    async def end(self) -> None:
        """Send the refusal in place of the response, if the request was refused."""
        if self._refusal.error is not None and not self.has_begun:
            await _answer(self._send, HTTPStatus.SERVICE_UNAVAILABLE, _body(self._refusal.error))


def _body(error: EngineAsleepError) -> dict[str, Any]:
    return {
        "success": False,  # as in the replies to control requests
        "message": error.message,
        "error": {
            "message": error.message,
            "type": ERROR_TYPE,
            "param": None,
            "code": int(HTTPStatus.SERVICE_UNAVAILABLE),
            "tags": _in_order(error.tags),
        },
    }


def _in_order(tags: Sequence[str] | frozenset[str]) -> list[str]:
    return [tag for tag in RELEASE_ORDER if tag in tags]


async def _answer(send: Send, status: HTTPStatus, content: Mapping[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
