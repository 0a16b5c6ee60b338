"""An SGLang server behind the interface `engines.Engine`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from memsaver.errors import ConfigError
from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.fields import parsed
from memsaver.integrations.sglang.http_client import ANSWER_BYTES, HttpClient
from memsaver.integrations.sglang.protocol import Answer, SchedulerState, states_of

__all__ = ["GENERATION_BYTES", "GENERATION_SECONDS", "ServedEngine"]

GENERATION_BYTES = 1 << 30  # tens of millions of tokens with their log-probabilities
GENERATION_SECONDS = 3600.0


class ServedEngine:
    """An SGLang server at a URL. Any thread may call it.

    Every call has a timeout, which covers the lookup of the host to the last byte of the answer. An
    answer has at most 64 MiB, and that of a generation 1 GiB. Redirects are errors, and no proxy is
    used.

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
        self.post("/release_memory_occupation", {"tags": list(tags)}, timeout)
        return []

    def resume(self, tags: Sequence[str], timeout: float) -> list[Answer]:
        """See `Engine`."""
        self.post("/resume_memory_occupation", {"tags": list(tags)}, timeout)
        return []

    def info(self, timeout: float) -> dict[str, Any]:
        """Return the server's own report: its arguments, its version and its schedulers' states.

        Raises:
            EngineError: the server cannot be reached, or is not an SGLang server.
        """
        source = f"{self._client.address}/server_info"
        info = parsed(self.get("/server_info", timeout), source)
        # No message quotes the answer, because a server's arguments may contain keys.
        if not isinstance(info, dict) or "internal_states" not in info:
            raise EngineError(f"{source} is not the answer of an SGLang server: no internal_states")
        return info

    def states(self, timeout: float) -> list[SchedulerState]:
        """See `Engine`."""
        states: list[SchedulerState] = states_of(self.info(timeout)["internal_states"])
        return states

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

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as `sglang.Engine.generate` does, with JSON arguments and results, no streams.

        Args:
            args: the prompt, unless it is passed by name.
            kwargs: SGLang's arguments, and `timeout`: seconds for the whole call, by default an
                hour.
        """
        if kwargs.get("stream"):
            raise ConfigError(
                "generate does not stream from a server at a URL: send the request to the server "
                "yourself, or leave out stream"
            )
        if len(args) > 1:
            raise ConfigError("for a server at a URL, pass all arguments but the prompt by name")
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

    def asked(self, name: str, payload: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Call a path whose answer says whether the call succeeded, and return the answer.

        Raises:
            EngineError: the call failed, or the server answered that it did not succeed.
        """
        text = self.post(f"/{name}", payload, timeout)
        answer = parsed(text, "the server's answer")
        told = answer if isinstance(answer, dict) else {}
        if told.get("success") is False:
            why = self._client.hidden_in(str(told.get("message")))
            raise EngineError(f"the server refused {name}: {why}")
        return told

    def get(self, path: str, timeout: float) -> str:
        """Return the server's answer to a GET. Raises as `post` does."""
        text: str = self._client.get(path, timeout)
        return text

    def post(
        self,
        path: str,
        payload: Mapping[str, Any],
        timeout: float,
        max_bytes: int = ANSWER_BYTES,
    ) -> str:
        """Post JSON, and return the server's answer. See `HttpClient.post`."""
        text: str = self._client.post(path, payload, timeout, max_bytes)
        return text

    def excerpt(self, text: object, characters: int = 1000) -> str:
        """Return the beginning of a text of the server for a message, with the key replaced."""
        shown: str = self._client.excerpt(text, characters)
        return shown
