"""HTTP responses of a sleeping server: status 503 with the released tags, and health reports.

`AsleepAnswers` is a middleware of an engine's server. The endpoints report errors in several
formats, some of them inside a stream that begins with status 200. The middleware therefore delays
the start of each response until the first part of the body arrives or the application's call ends,
and replaces the response if the request was refused. The delay applies even while all memory is
known to be mapped, because a release can overtake a request and is not recorded until the release
has ended. The body itself is never delayed.

While memory is released, a health request returns the released tags and causes no generation. The
response's status suits load balancers: it is 503 if requests are refused, and 200 if they wait or
wake the engine.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

from ..admission import Admission
from ..errors import EngineAsleepError, EngineTimeoutError
from ..policies import WhenAsleep
from ..refusals import Refusal, refusal_here
from ..tags import RELEASE_ORDER

__all__ = ["ERROR_TYPE", "AsleepAnswers", "add_innermost"]

ERROR_TYPE = "engine_asleep"  # in the error in the response's body
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

    The middleware becomes the innermost one, so the server's other middlewares first reject
    requests without a valid key, and still add their own headers (CORS) to the responses.

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
    """The middleware described in the module's docstring.

    Args:
        app: the application that serves the requests.
        admission: a function that returns the engine's `Admission`, or None if the engine has no
            `Admission` or does not exist yet.
        is_shared: a function that returns whether other processes of the server also release and
            resume memory.
        health: the paths of health requests, without the server's `root_path`.
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
        when = admission.policy.when_asleep if _route_path(scope) in self._health else None
        if when is not None and await self._is_asleep(admission):
            return await _answer(send, *_health(when, admission.released))
        refusal = Refusal()
        response = _Response(send, refusal)
        token = refusal_here.set(refusal)
        try:
            await self._app(scope, receive, response.send)
        except Exception:
            if refusal.error is None or response.has_begun:
                await response.begin()
                raise
        finally:
            refusal_here.reset(token)
        error = refusal.error
        if error is None or response.has_begun:
            return await response.begin()
        await _answer(send, *(_refused(error) if when is None else _health(when, error.tags)))
        return None

    async def _is_asleep(self, admission: Admission) -> bool:
        """Return whether memory is released. Queries the engine if the record may be outdated."""
        if not (admission.released or admission.policy.sleep_after or self._is_shared()):
            return False
        try:
            return bool(await admission.refresh())
        except EngineTimeoutError:
            return bool(admission.released)
        except Exception:  # the application's own response reports the failure
            return False


class _Response:
    """A response whose start is delayed until its body begins or `begin` is called.

    If the request is refused before the body begins, this response is not sent.

    Attributes:
        has_begun: whether the response is being sent.
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
        if self._refusal.error is not None:  # another response replaces this one
            return None
        await self.begin()
        return await self._send(message)

    async def begin(self) -> None:
        """Send the start of the response, unless there is none or it has already been sent."""
        self.has_begun = True
        start, self._start = self._start, None
        if start is not None:
            await self._send(start)


def _route_path(scope: Scope) -> str:
    """Return the request's path without the server's `root_path`, as Starlette's routes do."""
    path: str = scope["path"]
    rest = path.removeprefix(scope.get("root_path", ""))
    return path if rest and not rest.startswith("/") else rest


def _health(when: WhenAsleep, tags: Collection[str]) -> tuple[HTTPStatus, dict[str, Any]]:
    return _HEALTH_STATUS[when], {"status": "asleep", "tags": _in_order(tags)}


def _refused(error: EngineAsleepError) -> tuple[HTTPStatus, dict[str, Any]]:
    status = HTTPStatus.SERVICE_UNAVAILABLE
    return status, {
        "success": False,  # as in the replies to control requests
        "message": error.message,
        "error": {
            "message": error.message,
            "type": ERROR_TYPE,
            "param": None,
            "code": int(status),
            "tags": _in_order(error.tags),
        },
    }


def _in_order(tags: Collection[str]) -> list[str]:
    return [tag for tag in RELEASE_ORDER if tag in tags]


async def _answer(send: Send, status: HTTPStatus, content: Mapping[str, Any]) -> None:
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": int(status), "headers": headers})
    await send({"type": "http.response.body", "body": body})
