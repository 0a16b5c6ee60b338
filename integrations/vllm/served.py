"""A vLLM server at a URL as an `Engine`. Its endpoints for sleep need VLLM_SERVER_DEV_MODE=1."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from memsaver.errors import ConfigError

from ..engine.errors import EngineError
from ..engine.fields import Fields, parsed
from ..engine.http.client import HttpClient
from ..engine.interface import Request, Sample
from .link import GENERATION_SECONDS, Link
from .protocol import ROUTE
from .samples import completions_of, samples_in

__all__ = ["ServedEngine"]

_GENERATION_BYTES = 1 << 30  # tens of millions of tokens with their log-probabilities
_MOST_THREADS = 64  # generations with different parameters are requests of their own

_PATHS = {
    "sleep": "/sleep",
    "wake_up": "/wake_up",
    "reset_prefix_cache": "/reset_prefix_cache",
    "reset_mm_cache": "/reset_mm_cache",
    "pause": "/pause",
    "unpause": "/resume",
    "abort": "/abort_requests",
}


class ServedEngine(Link):
    """A vLLM server at a URL. Any thread may call it.

    Every call has a timeout, which covers the time from the lookup of the host to the last byte of
    the answer. An answer may have at most 64 MiB, or 1 GiB for a generation. Redirects are errors,
    and no proxy is used.

    Args:
        url: the server's address, such as "http://host:8000".
        api_key: the server's API key; None sends no key.

    Raises:
        ConfigError: the address or the key is invalid; the message contains neither.
        NotLoadedError: httpx is not installed.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._client = HttpClient(url, api_key)

    def __repr__(self) -> str:
        return f"<memsaver ServedEngine: {self._client.address}>"

    def has_plugin(self, timeout: float) -> bool:
        """See `Link`.

        Raises:
            EngineError: the server cannot be reached, or has no endpoints for sleep.
        """
        try:
            self._client.get(ROUTE, timeout)
        except EngineError as error:
            if error.http_status != HTTPStatus.NOT_FOUND:
                raise
            self._check_endpoints(timeout)
            return False
        return True

    def _check_endpoints(self, timeout: float) -> None:
        try:
            self._client.get("/is_sleeping", timeout)
        except EngineError as error:
            if error.http_status == HTTPStatus.NOT_FOUND:
                error.message += (
                    "; a vLLM server has endpoints for sleep only with VLLM_SERVER_DEV_MODE=1 and "
                    "--enable-sleep-mode"
                )
            raise

    def rpc(self, method: str, arguments: Sequence[Any], timeout: float) -> list[Any]:
        """See `Link`."""
        body = {"method": method, "args": list(arguments), "timeout": timeout}
        text = self._client.post("/collective_rpc", body, timeout)
        return Fields(parsed(text, "the server's answer"), "the server's answer").each("results")

    def call(self, name: str, arguments: Mapping[str, Any], timeout: float) -> Any:
        """See `Link`."""
        path = _PATHS[name]
        if arguments:
            words = {key: _word(value) for key, value in arguments.items()}
            path = f"{path}?{urlencode(words, doseq=True)}"
        text = self._client.post(path, {}, timeout)
        if name != "reset_prefix_cache":
            return None
        return Fields(parsed(text, "the server's answer"), "the server's answer").flag("success")

    def plain_arguments(self, timeout: float) -> dict[str, Any]:
        """See `Link`."""
        text = self._client.get("/server_info?config_format=json", timeout)
        # No message quotes the answer, because a server's arguments may contain keys.
        info = parsed(text, "the server's information")
        config = info.get("vllm_config") if isinstance(info, dict) else None
        ranks = config.get("parallel_config") if isinstance(config, dict) else None
        if not isinstance(ranks, dict):
            raise EngineError(
                f"{self._client.address} did not answer like a vLLM server: no parallel_config"
            )
        version = parsed(self._client.get("/version", timeout), "the server's version")
        return {
            "tp_size": ranks.get("tensor_parallel_size"),
            "pp_size": ranks.get("pipeline_parallel_size"),
            "dp_size": ranks.get("data_parallel_size"),
            "version": version.get("version") if isinstance(version, dict) else None,
        }

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Send a request to /v1/completions, and return the answer's JSON.

        Args:
            args: the prompt, unless it is passed by name.
            kwargs: the fields of the request, and `timeout`: seconds for the whole call, by default
                an hour.
        """
        if kwargs.get("stream"):
            raise ConfigError(
                "generate does not stream from a server at a URL: send the request to the server "
                "yourself, or omit stream"
            )
        if len(args) > 1:
            raise ConfigError("for a server at a URL, pass all arguments except the prompt by name")
        timeout = kwargs.pop("timeout", GENERATION_SECONDS)
        return self._complete({**({"prompt": args[0]} if args else {}), **kwargs}, timeout)

    def samples(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """See `Link`. The server aborts the requests if the connection ends."""
        bodies = completions_of(requests)
        found: dict[int, Sample] = {}
        with concurrent.futures.ThreadPoolExecutor(min(len(bodies), _MOST_THREADS)) as threads:
            answers = threads.map(lambda body: self._complete(body[1], timeout), bodies)
            for (numbers, _), answer in zip(bodies, answers, strict=True):
                found |= dict(zip(numbers, samples_in(answer, len(numbers)), strict=True))
        return [found[number] for number in range(len(requests))]

    def _complete(self, body: Mapping[str, Any], timeout: float) -> Any:
        text = self._client.post("/v1/completions", body, timeout, _GENERATION_BYTES)
        return parsed(text, "the server's answer")


def _word(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
