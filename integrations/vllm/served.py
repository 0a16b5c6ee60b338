"""The `Engine` for a vLLM server at a URL.

The server has endpoints for sleep only if it runs with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from memsaver._runtime.native import _C
from memsaver._runtime.timeouts import seconds_until

from ..engine.errors import EngineError, EngineTimeoutError
from ..engine.fields import Fields, parsed
from ..engine.http import served
from ..engine.interface import Request, Sample
from .link import Link
from .protocol import ROUTE
from .samples import completions_of, samples_in

__all__ = ["ServedEngine"]

_POLL_SECONDS = 0.01
_END_SECONDS = 5.0  # for requests that were ended or timed out
_MOST_THREADS = 64  # generations with different parameters are separate requests

_PATHS = {
    "sleep": "/sleep",
    "wake_up": "/wake_up",
    "reset_prefix_cache": "/reset_prefix_cache",
    "reset_mm_cache": "/reset_mm_cache",
    "pause": "/pause",
    "unpause": "/resume",
    "abort": "/abort_requests",
}


class ServedEngine(served.ServedEngine, Link):
    """A vLLM server at a URL. See `integrations.engine.http.served`."""

    _GENERATE = "/v1/completions"

    def has_plugin(self, timeout: float) -> bool:
        """See `Link`.

        Raises:
            EngineError: the server cannot be reached or has no endpoints for sleep.
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

    def has_sleep_mode(self, timeout: float) -> bool:
        """See `Link`. The result is True if the server's answer lacks this information."""
        try:
            config = self._config(timeout)
        except EngineError as error:
            if not error.http_status:
                raise
            return True
        model = _part(config, "model_config")
        return model.get("enable_sleep_mode") is not False or bool(
            model.get("enable_cumem_allocator")
        )

    def _config(self, timeout: float) -> dict[str, Any]:
        text = self._client.get("/server_info?config_format=json", timeout)
        # No message quotes the answer, because a server's arguments may contain keys.
        return _part(parsed(text, "the server's information"), "vllm_config")

    def plain_arguments(self, timeout: float) -> dict[str, Any]:
        """See `Link`."""
        config = self._config(timeout)
        ranks = _part(config, "parallel_config")
        if not ranks:
            raise EngineError(
                f"{self._client.address} did not answer like a vLLM server: no parallel_config"
            )
        version = parsed(self._client.get("/version", timeout), "the server's version")
        return {
            "tp_size": ranks.get("tensor_parallel_size"),
            "pp_size": ranks.get("pipeline_parallel_size"),
            "dp_size": ranks.get("data_parallel_size"),
            "skip_tokenizer_init": _part(config, "model_config").get("skip_tokenizer_init") is True,
            "version": version.get("version") if isinstance(version, dict) else None,
        }

    def samples(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """See `Link`. The server aborts the requests if the connection is closed."""
        bodies = completions_of(requests)
        deadline = time.monotonic() + timeout
        client = self._client.separate()

        def late() -> EngineTimeoutError:
            return EngineTimeoutError(
                f"{client.address}{self._GENERATE} did not answer all requests within "
                f"{timeout:.3g} s"
            )

        def complete(body: Mapping[str, Any]) -> Any:
            left = deadline - time.monotonic()
            if left <= 0:  # earlier requests have used up the time
                raise late()
            text = client.post(self._GENERATE, body, left, served.GENERATION_BYTES)
            return parsed(text, "the server's answer")

        found: dict[int, Sample] = {}
        calls: dict[concurrent.futures.Future[Any], list[int]] = {}
        threads = concurrent.futures.ThreadPoolExecutor(min(len(bodies), _MOST_THREADS))

        def start() -> None:
            # As in `start_daemon`: no finalizer runs before the threads have started.
            _C.pause_collection()
            try:
                for numbers, body in bodies:
                    calls[threads.submit(complete, body)] = numbers
            finally:
                _C.resume_collection()

        try:
            _C.uninterrupted(start, True)
            # A finalizer on the requests' threads may wait for a tag that this thread owns.
            left = seconds_until(deadline) + _END_SECONDS
            for call in concurrent.futures.as_completed(calls, left):
                numbers = calls[call]
                found |= dict(zip(numbers, samples_in(call.result(), len(numbers)), strict=True))
        except EngineTimeoutError:  # the error of one request, which is a TimeoutError too
            raise
        except concurrent.futures.TimeoutError as error:
            raise late() from error
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            end = time.monotonic() + _END_SECONDS
            while not all(call.done() for call in calls) and time.monotonic() < end:
                client.disconnect()
                time.sleep(_POLL_SECONDS)
        return [found[number] for number in range(len(requests))]


def _part(value: Any, name: str) -> dict[str, Any]:
    """Return an object that is nested in a JSON object; {} if the nested object is missing."""
    part = value.get(name) if isinstance(value, dict) else None
    return part if isinstance(part, dict) else {}


def _word(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
