"""An HTTP client for one server, based on httpx, with limits on time and size.

The client follows no redirects and uses no proxies, and its messages contain no secrets. Importing
this module does not require httpx; creating an `HttpClient` does.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import socket
import ssl
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from memsaver._runtime.text import plain_text, size_text
from memsaver._runtime.timeouts import check_timeout
from memsaver.errors import ConfigError, NotLoadedError

from ..errors import EngineError, EngineTimeoutError
from ..fields import encodable, parsed
from ..refusals import asleep_in
from .addresses import address_of, host_of, secret_of

__all__ = ["ANSWER_BYTES", "HttpClient"]

ANSWER_BYTES = 64 << 20

_SHOWN_CHARACTERS = 1000  # the maximum length of an answer's excerpt in a message
_AGENT = "memsaver"


class HttpClient:
    """A client for one server. Any thread may use the client; each call opens its own connection.

    The client follows no redirect and uses no proxy, so only the server receives the key. No
    message contains the key, even if the server repeats it.

    Attributes:
        address: the server's address as it appears in messages.

    Args:
        url: the server's address.
        api_key: the key to send as a bearer token; None sends no key.

    Raises:
        ConfigError: the address or the key is invalid; the message contains neither.
        NotLoadedError: httpx is not installed.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.address = address_of(url)
        self._key = secret_of(api_key)
        _import("httpx")
        self._tls = ssl.create_default_context() if url.startswith("https:") else None
        self._sockets: set[socket.socket] = set()  # sockets of the calls in progress

    def __repr__(self) -> str:
        return f"<memsaver HttpClient: {self.address}>"

    def separate(self) -> HttpClient:
        """Return a client for the same server whose `disconnect` ends only its own calls."""
        other = copy.copy(self)
        other._sockets = set()
        return other

    def disconnect(self) -> None:
        """Close the connections of the calls in progress, so that these calls fail.

        Later calls, and calls that have not connected yet, can still connect.
        """
        for connection in tuple(self._sockets):
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)

    def get(self, path: str, timeout: float, max_bytes: int = ANSWER_BYTES) -> str:
        """Send a GET request, and return the server's answer. Raises the errors of `post`."""
        return self._successful(path, self._answer("GET", path, b"", timeout, max_bytes))

    def post(
        self, path: str, payload: Mapping[str, Any], timeout: float, max_bytes: int = ANSWER_BYTES
    ) -> str:
        """Send JSON in a POST request, and return the server's answer if its status is 200.

        Args:
            path: the path, starting with a slash.
            payload: the fields to send as JSON.
            timeout: seconds for the whole call, from the lookup of the host to the last byte of the
                answer.
            max_bytes: the maximum size of the answer in bytes.

        Raises:
            ConfigError: the timeout is not a positive number, or JSON cannot represent the payload.
            EngineTimeoutError: the answer was not complete in time.
            EngineAsleepError: the server's engine is asleep and refuses the request.
            EngineError: the server cannot be reached, or its answer is too large, is not HTTP, or
                has another status (`http_status`), such as that of a redirect.
        """
        return self._successful(path, self.ask(path, payload, timeout, max_bytes))

    def ask(
        self, path: str, payload: Mapping[str, Any], timeout: float, max_bytes: int = ANSWER_BYTES
    ) -> tuple[int, str]:
        """Send JSON in a POST request, and return the status and the text of the server's answer.

        The arguments and errors are the same as for `post`, except that a status other than 200
        raises an error only for redirects. If the status is not 200, the API key is redacted from
        the text.
        """
        return self._answer("POST", path, _json(payload), timeout, max_bytes)

    def error_for(self, path: str, status: int, text: str) -> EngineError:
        """Return the error for an answer with a status other than 200."""
        why = self.hidden_in(_reason(text)) or self.excerpt(text) or _phrase(status)
        failed = EngineError(f"{self.address}{path} answered {status}: {why}")
        failed.http_status = status
        return failed

    def check_awake(self, text: str) -> None:
        """Raise `EngineAsleepError` if a server's text is the refusal of a sleeping engine."""
        asleep = asleep_in(_reason(text))
        if asleep is not None:
            raise asleep

    def hidden_in(self, text: str) -> str:
        """Return a server's full text, encodable as UTF-8, with the API key redacted."""
        return encodable(self._key.hidden_in(text))

    def excerpt(self, text: object) -> str:
        """Return the beginning of a server's text for a message, with the API key redacted."""
        return plain_text(self.hidden_in(str(text)))[:_SHOWN_CHARACTERS]

    def _successful(self, path: str, answer: tuple[int, str]) -> str:
        status, text = answer
        if status != HTTPStatus.OK:
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                self.check_awake(text)
            raise self.error_for(path, status, text)
        return text

    def _answer(
        self, method: str, path: str, body: bytes, timeout: float, max_bytes: int
    ) -> tuple[int, str]:
        check_timeout(timeout)
        got = self._exchange(method, path, body, timeout, max_bytes)
        # Raised here because an exception raised below would have httpx's exception as its context,
        # which contains the request and its key.
        if isinstance(got, EngineError):
            raise got
        status, target, text = got
        if not 300 <= status < 400:
            return status, text
        failed = EngineError(
            f"{self.address}{path} answered {status}, a redirect to {target}, and redirects are "
            "not followed: use the server's own address"
        )
        failed.http_status = status
        raise failed

    def _exchange(
        self, method: str, path: str, body: bytes, timeout: float, max_bytes: int
    ) -> tuple[int, str, str] | EngineError:
        """Return the status, the host of a redirect's target, and the text; or return an error."""
        httpx, httpcore = _import("httpx"), _import("httpcore")
        from .sockets import DeadlineTransport

        url = self.address + path
        headers = {"Accept-Encoding": "identity", "Connection": "close", "User-Agent": _AGENT}
        if body:
            headers["Content-Type"] = "application/json"
        if self._key:
            headers["Authorization"] = f"Bearer {self._key.reveal()}"
        try:
            request = httpx.Request(method, url, headers=headers, content=body)
        except httpx.InvalidURL:
            return EngineError(f"{self.address} is not an address that httpx accepts")
        # `httpx.Client` would log each request, and waiting for a server takes many requests.
        deadline = time.monotonic() + timeout
        with DeadlineTransport(deadline, self._tls, self._sockets) as transport:
            try:
                response = transport.handle_request(request)
                try:
                    return self._read(url, response, max_bytes)
                finally:
                    response.close()
            except httpcore.TimeoutException:
                return EngineTimeoutError(f"{url} did not answer in full within {timeout:.3g} s")
            except httpcore.ConnectError as error:
                return EngineError(f"{url} cannot be reached: {error}")
            except httpcore.NetworkError as error:
                return EngineError(f"{url} closed the connection ({error}); the server may be dead")
            except httpcore.ProtocolError:  # its text comes from the server and is not shown
                return EngineError(
                    f"{url} closed the connection early, or its answer is not HTTP; the server may "
                    "be dead"
                )

    def _read(self, url: str, response: Any, max_bytes: int) -> tuple[int, str, str] | EngineError:
        status, headers = response.status_code, response.headers
        if 300 <= status < 400:
            return status, host_of(headers.get("Location", "")) or "another path", ""
        too_large = EngineError(
            f"{url} answered with more than the allowed {size_text(max_bytes)}: request less at "
            "once"
        )
        encoding = headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            return EngineError(
                f"{url} compressed its answer, although the request did not allow it: turn off "
                "compression in the server and in proxies in front of it"
            )
        if _length(headers.get("Content-Length", "")) > max_bytes:
            return too_large
        body = bytearray()
        for part in response.iter_raw():
            body += part
            if len(body) > max_bytes:
                return too_large
        text = body.decode(errors="replace")
        return status, "", text if status == HTTPStatus.OK else self.hidden_in(text)


def _reason(text: str) -> str:
    """Return the message in a server's JSON error; "" for any other text."""
    try:
        return str(parsed(text, "an error")["error"]["message"])
    except (EngineError, KeyError, TypeError):
        return ""


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "no text"


def _length(text: str) -> int:
    """Return a Content-Length as a number; 0 if it is missing or invalid."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else 0


def _json(payload: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(payload, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the arguments cannot be sent to a server as JSON: {error}; pass images and other "
            "binary data as URLs, paths or base64"
        ) from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise NotLoadedError(
            f"requests to a server need {name}, which is not installed: "
            '`pip install "memsaver[http]"`'
        ) from None
