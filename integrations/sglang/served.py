"""An SGLang server, as `engines.Engine` has it."""

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
    """An SGLang server at a URL. Any thread.

    Every call is bounded in time, from looking up the host to the answer's last byte, and an answer
    in size: 64 MiB, or 1 GiB of a generation. Redirects are errors, and no proxy is used.

    Args:
        url: the server's address, such as "http://host:30000".
        api_key: what the server asks for; None sends none.

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
        """Return what the server says of itself: its arguments, its version and its states.

        Raises:
            EngineError: it cannot be reached, or is not an SGLang server.
        """
        source = f"{self._client.address}/server_info"
        info = parsed(self.get("/server_info", timeout), source)
        # Its text is in no message: an SGLang server's arguments may contain keys.
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
        """Generate as `sglang.Engine.generate`, with JSON arguments and results, and no streams.

        Args:
            args: the prompt, unless it is passed by name.
            kwargs: as SGLang names them; and `timeout`, seconds for all of it, by default an hour.
        """
        if kwargs.get("stream"):
            raise ConfigError("a controller over a URL does not stream: ask the server itself")
        if len(args) > 1:
            raise ConfigError("over a URL, pass what comes after the prompt by name")
        timeout = kwargs.pop("timeout", GENERATION_SECONDS)
        payload = {name: value for name, value in kwargs.items() if value is not None}
        prompt = payload.pop("prompt", args[0] if args else None)
        if prompt is not None:
            payload["text"] = prompt
        return self.generated(payload, timeout)

    def generated(self, payload: Mapping[str, Any], timeout: float) -> Any:
        """Return what the server answers to a generation, whose fields are those of its JSON."""
        text = self.post("/generate", payload, timeout, GENERATION_BYTES)
        return parsed(text, "the server's answer")

    def asked(self, name: str, payload: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Return the server's answer to a call that answers whether it succeeded.

        Raises:
            EngineError: also if the server answers that it did not succeed.
        """
        text = self.post(f"/{name}", payload, timeout)
        answer = parsed(text, "the server's answer")
        told = answer if isinstance(answer, dict) else {}
        if told.get("success") is False:
            why = self._client.hidden_in(str(told.get("message")))
            raise EngineError(f"the server refused {name}: {why}")
        return told

    def get(self, path: str, timeout: float) -> str:
        """Return the server's answer to a GET; errors as of `post`."""
        text: str = self._client.get(path, timeout)
        return text

    def post(
        self,
        path: str,
        payload: Mapping[str, Any],
        timeout: float,
        max_bytes: int = ANSWER_BYTES,
    ) -> str:
        """Return the server's answer to a POST of JSON; see `HttpClient.post`."""
        text: str = self._client.post(path, payload, timeout, max_bytes)
        return text

    def excerpt(self, text: object, characters: int = 1000) -> str:
        """Return the beginning of what the server said, for a message: without the key."""
        shown: str = self._client.excerpt(text, characters)
        return shown
