"""SGLang as a `Backend` for rollouts: an engine in this process, or a server at a URL.

For SGLang 0.5.11 and newer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memsaver._runtime.timeouts import check_timeout
from memsaver.errors import ConfigError

from ..engine.backend import ranks_in
from ..engine.errors import EngineError
from ..engine.interface import PauseMode, Request, Sample
from . import versions
from .engines import LocalEngine, ServedEngine, connect
from .samples import payload_of, samples_of
from .sleep import SleepController
from .weight_calls import WeightCalls

__all__ = ["SGLangBackend", "backend_of"]

_ABORT_SECONDS = 5.0  # to abort a generation, after the generation's own timeout
_PAUSE_MODES = ("abort", "retract", "in_place")


def backend_of(engine: Any, *, api_key: str | None = None, timeout: float = 60.0) -> SGLangBackend:
    """Return the backend for an engine.

    Args:
        engine: an `sglang.Engine` in this process, or a server's URL.
        api_key: the server's API key, or its admin key if it has one.
        timeout: the limit on querying the engine's arguments and state, in seconds.

    Raises:
        ConfigError: `engine` is neither an `sglang.Engine` nor a URL, its version is not
            supported, or the address, the key or the timeout is invalid. No message
            contains the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed
            (`pip install "memsaver[http]"`).
        EngineError: the engine cannot be reached in time.
    """
    return SGLangBackend(connect(engine, api_key), timeout)


class SGLangBackend(WeightCalls):
    """See `engine.interface.Backend`.

    Args:
        link: the connection to the engine.
        timeout: the limit on querying the engine's arguments and state, in seconds.
        end: a function that shuts the engine down, called once; None if the engine's owner shuts it
            down.
    """

    def __init__(
        self,
        link: LocalEngine | ServedEngine,
        timeout: float = 60.0,
        end: Callable[[], None] | None = None,
    ) -> None:
        check_timeout(timeout)
        arguments = link.arguments(timeout)
        outer = _outer_sizes(arguments)
        super().__init__(link, arguments, outer, end)
        self.tp_size = ranks_in(arguments, "tp_size") * math.prod(outer.values())
        _check_version(arguments.get("version"))
        self.selects = versions.selects_models(arguments.get("version"))
        self.control = SleepController(link, timeout=timeout)

    def _samples(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        payload = payload_of(requests)
        try:
            return samples_of(self.link.generated(payload, timeout))
        except BaseException:
            with contextlib.suppress(EngineError):
                self.link.abort_requests(payload["rid"], _ABORT_SECONDS)
            raise

    def pause_generation(self, mode: PauseMode, timeout: float) -> None:
        """See `Backend`."""
        if mode not in _PAUSE_MODES:
            raise ConfigError(f"the mode must be one of {', '.join(_PAUSE_MODES)}, not {mode!r}")
        self._do("pause_generation", {"mode": mode}, timeout)

    def continue_generation(self, timeout: float) -> None:
        """See `Backend`."""
        self._do("continue_generation", {}, timeout)


def _outer_sizes(server_args: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of the parallel dimensions other than tensor parallelism."""
    replicas = ranks_in(server_args, "dp_size")
    if server_args.get("enable_dp_attention"):
        replicas = 1  # they use the ranks of the tensor-parallel group
    return {"dp_size": replicas, "pp_size": ranks_in(server_args, "pp_size")}


def _check_version(version: str | None) -> None:
    """Raise `ConfigError` if this version of SGLang lacks a required feature."""
    if version is not None and versions.is_too_old(version):
        raise ConfigError(
            f"the engine runs SGLang {version}; rollouts need {versions.PLUGINS_SINCE} or newer"
        )
