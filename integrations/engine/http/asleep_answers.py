"""HTTP responses of a sleeping server: status 503 with the released tags, and health reports.

`AsleepAnswers` is a middleware of an engine's server that does nothing while all memory is known to
be mapped. The endpoints report errors in several formats, some of them inside a stream that begins
with status 200. The middleware therefore delays the start of each response until the first part of
its body, and replaces the response if the request was refused. This delay applies while memory is
released. The delay also applies if memory can be released without a record, because the engine
sleeps when idle or because other processes change its memory.

While memory is released, a health request returns the released tags and causes no generation. The
status of this response is suitable for load balancers: 503 if requests are refused, and 200 if
requests wait or wake the engine.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from http import HTTPStatus
from typing import Any

from ..admission import Admission
from ..errors import EngineAsleepError, EngineTimeoutError
from ..policies import WhenAsleep
from ..refusals import Refusal, refusal_here
from ..tags import RELEASE_ORDER

__all__ = ["ERROR_TYPE", "AsleepAnswers", "add_innermost"]

ERROR_TYPE = "engine_asleep"  # in the error of the response's body
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


def add_innermost(app: Any, **arguments: Any) -> None:
    """Add the middleware to a FastAPI application, before the server starts.

    The middleware is the innermost: the server's other middlewares first reject requests without a
    valid key, and add their own headers (CORS) to the responses.

    Args:
        app: the application.
        arguments: the arguments of `AsleepAnswers`, except `app`.

    Raises:
        AttributeError: the application does not have the expected interface.
    """
    all_middleware = app.user_middleware  # the outermost first
    app.add_middleware(AsleepAnswers, **arguments)
    all_middleware.append(all_middleware.pop(0))


class AsleepAnswers:
    """The middleware that this module describes.

    Args:
        app: the application that serves the requests.
        admission: a function that returns the engine's `Admission`, or None if the engine has no
            `Admission` or does not exist yet.
        is_shared: a function that returns whether other processes of the server also release and
            resume memory.
        health: the paths of health requests.
    """

    def __init__(
        self,
        app: App,
        admission: Callable[[], Admission | None],
        is_shared: Callable[[], bool],
        health: Collection[str],
    ) -> None:
        self._app = app
        self._admission = admission
        self._is_shared = is_shared
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        admission = self._admission() if scope["type"] == "http" else None
        if admission is None:
            return await self._app(scope, receive, send)
        if scope["path"] in self._health and await self._is_asleep(admission):
            return await _answer(
                send,
                _HEALTH_STATUS[admission.policy.when_asleep],
                {"status": "asleep", "tags": _in_order(admission.released)},
            )
        if self._may_be_asleep(admission):
            return await self._held_back(scope, receive, send)
        return await self._app(scope, receive, send)

    def _may_be_asleep(self, admission: Admission) -> bool:
        """Return whether memory is released, or might have been released without a record."""
        return bool(admission.released or admission.policy.sleep_after or self._is_shared())

    async def _is_asleep(self, admission: Admission) -> bool:
        """Return whether memory is released. Queries the engine if the record might be old."""
        if not self._may_be_asleep(admission):
            return False
        try:
            return bool(await admission.refresh())
        except EngineTimeoutError:
            return bool(admission.released)
        except Exception:  # the application's own answer reports the failure
            return False

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
        has_begun: whether the start of the response was sent.
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
