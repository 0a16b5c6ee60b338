"""vLLM as a `Backend` for rollouts: an engine of this process, or a server at a URL.

For vLLM 0.26 and newer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from memsaver._runtime.timeouts import check_timeout
from memsaver.errors import ConfigError

from ..engine.errors import EngineError
from ..engine.fields import is_whole
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
        engine: a `vllm.LLM` or an `AsyncLLM` of this process, or a server's URL.
        api_key: the server's API key.
        timeout: seconds for the query of the engine's arguments and state.
        level: see `SleepController`.

    Raises:
        ConfigError: `engine` is none of these, or the address, the key or the timeout is invalid.
            No message contains the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed
            (`pip install "memsaver[http]"`).
        EngineError: the engine cannot be reached in time.
    """
    return VLLMBackend(connect(engine, api_key), timeout, level=level)


class VLLMBackend(WeightCalls):
    """See `engine.interface.Backend`.

    Args:
        link: the connection with the engine.
        timeout: seconds for the query of the engine's arguments and state.
        end: ends the engine; called once. None if the engine's owner ends the engine.
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
        self.link, self._end = link, end
        arguments = link.arguments(timeout)
        self._has_tokenizer = not arguments.get("skip_tokenizer_init")
        self.tp_size = _ranks(arguments, "tp_size")
        self.other_ranks = _other_ranks(arguments)
        version = arguments.get("weight_version")
        self.weight_version = None if version is None else str(version)
        self.control = SleepController(link, level=level, timeout=timeout)

    def generate(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """See `Backend`."""
        if not requests:
            return []
        if not self._has_tokenizer and any(one.text is not None for one in requests):
            raise ConfigError(
                "the engine has no tokenizer for texts: pass token ids, or start the engine with "
                "skip_tokenizer_init=False"
            )
        with self.control.request():
            samples = self.link.samples(requests, timeout)
        return [
            replace(one, weight_version=one.weight_version or self.weight_version)
            for one in samples
        ]

    def pause_generation(self, mode: PauseMode, timeout: float) -> None:
        """See `Backend`."""
        self.link.pause(mode, timeout)

    def continue_generation(self, timeout: float) -> None:
        """See `Backend`."""
        self.link.unpause(timeout)

    def death(self) -> str:
        """See `Backend`."""
        return self.link.death()

    def close(self) -> None:
        """See `Backend`."""
        end, self._end = self._end, None
        if end is not None:
            end()


def _ranks(arguments: Mapping[str, Any], name: str) -> int:
    """Return a number of ranks from the engine's arguments; 1 if it is missing."""
    value = arguments.get(name)
    if value is None:
        return 1
    if not is_whole(value) or value < 0:
        raise EngineError(
            f"the engine reports {name}={str(value)[:80]!r}, which is not a number of ranks"
        )
    return int(value) or 1


def _other_ranks(arguments: Mapping[str, Any]) -> str:
    """See `WeightCalls`."""
    for name, theirs in _GROUPS.items():
        if (count := _ranks(arguments, name)) > 1:
            return f"{theirs}={count}"
    return ""
