"""A rollout `Backend` for a vLLM engine in this process or a vLLM server at a URL.

This module supports vLLM 0.26 and newer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from memsaver._runtime.timeouts import check_timeout

from ..engine.backend import ranks_in
from ..engine.interface import PauseMode, Request, Sample
from .engines import connect
from .link import Link
from .sleep import SleepController
from .weight_calls import WeightCalls

__all__ = ["VLLMBackend", "backend_of"]

_GROUPS = {"pp_size": "pipeline_parallel_size", "dp_size": "data_parallel_size"}


def backend_of(
    engine: Any, *, api_key: str | None = None, timeout: float = 60.0, level: int = 1
) -> VLLMBackend:
    """Return the backend for an engine.

    Args:
        engine: a `vllm.LLM` or an `AsyncLLM` in this process, or a server's URL.
        api_key: the server's API key.
        timeout: the time limit in seconds for the query of the engine's arguments and state.
        level: see `SleepController`.

    Raises:
        ConfigError: `engine` is of another type, or the address, the key or the timeout is invalid.
            Error messages never contain the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed
            (`pip install "memsaver[http]"`).
        EngineError: the engine cannot be reached in time.
    """
    return VLLMBackend(connect(engine, api_key), timeout, level=level)


class VLLMBackend(WeightCalls):
    """See `engine.interface.Backend`.

    Args:
        link: the connection to the engine.
        timeout: the time limit in seconds for the query of the engine's arguments and state.
        end: a function that shuts the engine down and is called once; None if the engine's owner
            shuts it down.
        level: see `SleepController`.
    """

    def __init__(
        self,
        link: Link,
        timeout: float = 60.0,
        end: Callable[[], None] | None = None,
        *,
        level: int = 1,
    ) -> None:
        check_timeout(timeout)
        arguments = link.arguments(timeout)
        groups = {name: ranks_in(arguments, short) for short, name in _GROUPS.items()}
        super().__init__(link, arguments, groups, end)
        self.tp_size = ranks_in(arguments, "tp_size")
        version = arguments.get("weight_version")
        self.weight_version = None if version is None else str(version)
        self.control = SleepController(link, level=level, timeout=timeout)

    def _samples(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        return [
            replace(one, weight_version=one.weight_version or self.weight_version)
            for one in self.link.samples(requests, timeout)
        ]

    def pause_generation(self, mode: PauseMode, timeout: float) -> None:
        """See `Backend`."""
        self.link.pause(mode, timeout)

    def continue_generation(self, timeout: float) -> None:
        """See `Backend`."""
        self.link.unpause(timeout)
