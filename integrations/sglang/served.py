"""An SGLang server at a URL as an `Engine`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from memsaver.errors import ConfigError

from ..engine.errors import EngineError
from ..engine.fields import parsed
from ..engine.http.client import ANSWER_BYTES, HttpClient
from ..engine.messages import Answer, SchedulerState
from .protocol import FORGIVING, states_of
from .replies import Reply, UnknownRequestError

__all__ = ["GENERATION_BYTES", "GENERATION_SECONDS", "ServedEngine"]

GENERATION_BYTES = 1 << 30  # tens of millions of tokens with their log-probabilities
GENERATION_SECONDS = 3600.0

_PATHS = {"check_weights": "weights_checker"}  # of requests whose path differs from the method


class ServedEngine:
    """An SGLang server at a URL. Any thread may call it.

    Every call has a timeout, which covers the time from the lookup of the host to the last byte of
    the answer. An answer may have at most 64 MiB, or 1 GiB for a generation. Redirects are errors,
    and no proxy is used.

    Args:
        url: the server's address, such as "http://host:30000".
        api_key: the server's API key; None sends no key.

    Raises:
        ConfigError: the address or the key is invalid; the message contains neither.
        NotLoadedError: httpx is not installed.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._client = HttpClient(url, api_key)

    def __repr__(self) -> str:
        return f"<memsaver ServedEngine: {self._client.address}>"

    def release(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """See `Engine`."""
        self._change("/release_memory_occupation", tags, timeout)
        return []

    def resume(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """See `Engine`."""
        self._change("/resume_memory_occupation", tags, timeout)
        return []

    def _change(self, path: str, tags: Sequence[str], timeout: float) -> None:
        self.post(path, {"tags": list(tags), "rid": FORGIVING}, timeout)

    def info(self, timeout: float) -> dict[str, Any]:
        """Return the server's own report: its arguments, its version and its schedulers' states.

        Raises:
            EngineError: the server cannot be reached, or is not an SGLang server.
        """
        source = f"{self._client.address}/server_info"
        info = parsed(self.get("/server_info", timeout), source)
        # No message quotes the answer, because a server's arguments may contain keys.
        if not isinstance(info, dict) or "internal_states" not in info:
            raise EngineError(f"{source} did not answer like an SGLang server: no internal_states")
        return info

    def states(self, timeout: float) -> list[SchedulerState]:
        """See `Engine`."""
        return states_of(self.info(timeout)["internal_states"])

    def flush(self, timeout: float) -> bool:
        """See `Engine`."""
        try:
            self.post("/flush_cache", {}, timeout)
        except EngineError as error:
            if error.http_status == HTTPStatus.BAD_REQUEST:
                return False
            raise
        return True

    def abort(self, timeout: float) -> None:
        """See `Engine`."""
        self.post("/abort_request", {"abort_all": True}, timeout)

    def abort_requests(self, rids: Sequence[str], timeout: float) -> None:
        """Abort as many requests as the time allows, by their ids.

        Requests that are not aborted in time are left to the server, which detects disconnected
        clients itself.
        """
        deadline = time.monotonic() + timeout
        for rid in rids:
            if (left := deadline - time.monotonic()) <= 0:
                return
            self.post("/abort_request", {"rid": rid}, left)

    def arguments(self, timeout: float) -> dict[str, Any]:
        """Return the server's arguments and its version.

        Raises:
            EngineError: see `info`; or the server reports no version.
        """
        info = self.info(timeout)
        if not isinstance(info.get("version"), str):
            raise EngineError("the server is not an SGLang server: it reports no version of SGLang")
        return info

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate like `sglang.Engine.generate`, with JSON arguments and results, not streamed.

        Args:
            args: the prompt, unless it is passed by name.
            kwargs: SGLang's arguments, and `timeout`: seconds for the whole call, by default an
                hour.
        """
        if kwargs.get("stream"):
            raise ConfigError(
                "generate does not stream from a server at a URL: send the request to the server "
                "yourself, or omit stream"
            )
        if len(args) > 1:
            raise ConfigError("for a server at a URL, pass all arguments except the prompt by name")
        timeout = kwargs.pop("timeout", GENERATION_SECONDS)
        payload = {name: value for name, value in kwargs.items() if value is not None}
        prompt = payload.pop("prompt", args[0] if args else None)
        if prompt is not None:
            payload["text"] = prompt
        return self.generated(payload, timeout)

    def generated(self, payload: Mapping[str, Any], timeout: float) -> Any:
        """Return the server's answer to a generation request with these JSON fields."""
        text = self.post("/generate", payload, timeout, GENERATION_BYTES)
        return parsed(text, "the server's answer")

    def ask(self, name: str, payload: Mapping[str, Any], timeout: float) -> Reply:
        """Send the SGLang request with this method name, and return the reply.

        Raises:
            UnknownRequestError: this version of SGLang does not have the method.
            EngineError: the server's answer does not report whether the request succeeded.
        """
        path = f"/{_PATHS.get(name, name)}"
        status, text = self._client.ask(path, payload, timeout)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self._client.check_awake(text)
        fields = _fields_in(text, required=status == HTTPStatus.OK)
        success = fields.get("success")
        if status != HTTPStatus.OK and not isinstance(success, bool):
            failed = self._client.error_for(path, status, text)
            if status == HTTPStatus.NOT_FOUND:
                raise UnknownRequestError(failed.message)
            raise failed
        message = self._client.hidden_in(str(fields.get("message", "")))
        return Reply(success is not False, message, fields.get("ranks") or ())

    def get(self, path: str, timeout: float) -> str:
        """Return the server's answer to a GET. Raises like `post`."""
        return self._client.get(path, timeout)

    def post(
        self,
        path: str,
        payload: Mapping[str, Any],
        timeout: float,
        max_bytes: int = ANSWER_BYTES,
    ) -> str:
        """Post JSON, and return the server's answer. See `HttpClient.post`."""
        return self._client.post(path, payload, timeout, max_bytes)


def _fields_in(text: str, *, required: bool) -> dict[str, Any]:
    """Return the fields of a JSON object; {} for other JSON and, if not `required`, other text.

    Raises:
        EngineError: the text is `required` to be JSON and is not.
    """
    try:
        found = parsed(text, "the server's answer")
    except EngineError:
        if required:
            raise
        return {}
    return found if isinstance(found, dict) else {}
