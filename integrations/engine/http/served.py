"""`ServedEngine`: an engine's server at a URL, with the code that all engines share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memsaver.errors import ConfigError

from ..fields import parsed
from ..interface import GENERATION_SECONDS
from .client import HttpClient

__all__ = ["GENERATION_BYTES", "ServedEngine"]

GENERATION_BYTES = 1 << 30  # tens of millions of tokens with their log-probabilities


class ServedEngine:
    """A server at a URL. Any thread may make calls.

    Every call has a timeout, which covers the time from the lookup of the host to the last byte of
    the answer. The maximum size of an answer is 64 MiB, or 1 GiB for a generation. Redirects are
    errors, and no proxy is used.

    Args:
        url: the server's address, such as "http://host:8000".
        api_key: the server's API key; None sends no key.

    Raises:
        ConfigError: the address or the key is invalid; the message contains neither.
        NotLoadedError: httpx is not installed.
    """

    _GENERATE: str  # the path of requests to generate

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._client = HttpClient(url, api_key)

    def __repr__(self) -> str:
        return f"<memsaver ServedEngine: {self._client.address}>"

    def death(self) -> str:
        """Return "", because it is unknown whether a server's processes have exited."""
        return ""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Send a generation request without streaming, and return the JSON of the answer.

        Args:
            args: the prompt, unless it is a keyword argument.
            kwargs: the engine's own arguments, and `timeout`, the seconds for the whole call (by
                default an hour).
        """
        if kwargs.get("stream"):
            raise ConfigError(
                "generate does not stream from a server at a URL: send the request to the server "
                "yourself, or omit stream"
            )
        if len(args) > 1:
            raise ConfigError("for a server at a URL, pass all arguments except the prompt by name")
        timeout = kwargs.pop("timeout", GENERATION_SECONDS)
        return self.generated({**({"prompt": args[0]} if args else {}), **kwargs}, timeout)

    def generated(self, payload: Mapping[str, Any], timeout: float) -> Any:
        """Return the server's answer to a generation request with these JSON fields."""
        text = self._client.post(self._GENERATE, payload, timeout, GENERATION_BYTES)
        return parsed(text, "the server's answer")
