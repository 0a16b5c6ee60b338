"""`Link`, the base class for calls to a vLLM engine in this process or on a server.

A subclass provides vLLM's own calls. If the engine has memsaver's plugin, the class queries,
releases and resumes memory with calls to `core_calls` through vLLM's collective_rpc. Without the
plugin, a release is vLLM's sleep, which releases the weights and the KV cache together.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from memsaver._runtime.timeouts import seconds_until
from memsaver.errors import ConfigError

from ..engine.errors import EngineError
from ..engine.fields import Fields
from ..engine.interface import PauseMode, Request, Sample
from ..engine.messages import Answer, SchedulerState, error_of
from ..engine.tags import GRAPH, KV_CACHE, WEIGHTS
from .protocol import INFO, RELEASE, RESUME, STATE

__all__ = ["Link", "without_sleep_mode"]

_LEAST_SECONDS = 1.0  # the minimum timeout of a call that follows another call

# vLLM's pause modes, by the modes of `Backend`.
_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep", "wait": "wait"}


class Link(abc.ABC):
    """A vLLM engine as an `Engine`. Every call has a timeout in seconds.

    Attributes:
        level: vLLM's sleep level. Level 1 saves the weights in host memory. Level 2 discards the
            weights, which must therefore be loaded after the wake-up.
    """

    level: int = 1

    # --- the engine's memory ----------------------------------------------------------------------

    def release(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """See `Engine`."""
        if self.has_plugin(timeout):
            deadline = time.monotonic() + timeout
            arguments = [list(tags), self.level, *_kept(keep_weights)]
            try:
                answers = self._change(RELEASE, arguments, timeout)
            except Exception:
                with contextlib.suppress(EngineError):
                    self._drop_inputs(deadline)
                raise
            self._drop_inputs(deadline)
            return answers
        if not {WEIGHTS, KV_CACHE} <= set(tags):
            raise ConfigError(
                f"without memsaver's plugin, vLLM cannot release {', '.join(tags)} alone: release "
                "the weights and the KV cache together, or install the plugin"
            )
        deadline = time.monotonic() + timeout
        if not self.has_sleep_mode(timeout):
            raise without_sleep_mode()
        level = self.level if keep_weights else 2
        left = seconds_until(deadline, _LEAST_SECONDS)
        self.call("sleep", {"level": level, "mode": "abort"}, left)
        return []

    def resume(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """See `Engine`. Without the plugin, the weights are always restored."""
        if self.has_plugin(timeout):
            return self._change(RESUME, [list(tags), *_kept(keep_weights)], timeout)
        wanted = [tag for tag in tags if tag != GRAPH]
        if wanted:
            self.call("wake_up", {"tags": wanted}, timeout)
        return []

    def _drop_inputs(self, deadline: float) -> None:
        """Make the front end drop the inputs that the engine core drops, as vLLM's own sleep does.

        The engine core drops them even if the sleep then fails.
        """
        self.call("reset_mm_cache", {}, seconds_until(deadline, _LEAST_SECONDS))

    def _change(self, method: str, arguments: list[Any], timeout: float) -> list[Answer]:
        answers = [Answer.from_fields(row) for row in self.rpc(method, arguments, timeout)]
        failed = error_of(answers)
        if failed is not None:
            raise failed
        return answers

    def states(self, timeout: float) -> list[SchedulerState]:
        """See `Engine`."""
        if not self.has_plugin(timeout):
            return []
        return [SchedulerState.from_fields(row) for row in self.rpc(STATE, [], timeout)]

    def flush(self, timeout: float) -> bool:
        """See `Engine`."""
        return bool(self.call("reset_prefix_cache", {}, timeout))

    def abort(self, timeout: float) -> None:
        """See `Engine`."""
        self.call("abort", {}, timeout)

    # --- rollouts ---------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Stop generating. See `Backend.pause_generation`."""
        if mode not in _MODES:
            raise ConfigError(f"the mode must be one of {', '.join(_MODES)}, not {mode!r}")
        # vLLM keeps the prefix cache here: flushing it is a separate call.
        self.call("pause", {"mode": _MODES[mode], "clear_cache": False}, timeout)
        if mode == "retract":
            self.call("reset_prefix_cache", {"reset_running_requests": True}, timeout)

    def unpause(self, timeout: float) -> None:
        """Resume a paused generation."""
        self.call("unpause", {}, timeout)

    def arguments(self, timeout: float) -> dict[str, Any]:
        """Return the engine's parallel sizes, its version and the version of its weights."""
        if not self.has_plugin(timeout):
            return self.plain_arguments(timeout)
        rows = self.rpc(INFO, [], timeout)
        if not rows:
            raise EngineError("the engine has no description")
        read = Fields(rows[0], "an engine's description")
        found = {name: read.optional(name) for name in rows[0]}
        if len(rows) > 1:  # a replica of a dense model does not know the other replicas
            found["dp_size"] = len(rows)
        return found

    # --- vLLM's own calls -------------------------------------------------------------------------

    @abc.abstractmethod
    def has_plugin(self, timeout: float) -> bool:
        """Return whether the engine has memsaver's plugin.

        A test call cannot answer this question: a call to a method that the workers lack would
        leave responses in vLLM's queues, and vLLM's next call would read them.
        """

    @abc.abstractmethod
    def rpc(self, method: str, arguments: Sequence[Any], timeout: float) -> list[Any]:
        """Call vLLM's `collective_rpc`. Arguments and results are JSON values."""

    @abc.abstractmethod
    def call(self, name: str, arguments: Mapping[str, Any], timeout: float) -> Any:
        """Call a vLLM function.

        Args:
            name: "sleep", "wake_up", "reset_prefix_cache", "reset_mm_cache", "abort", "pause" or
                "unpause".
            arguments: the function's arguments.
            timeout: the time limit for the call, in seconds.

        Returns:
            The result of "reset_prefix_cache"; None for all other calls.
        """

    @abc.abstractmethod
    def has_sleep_mode(self, timeout: float) -> bool:
        """Return False if an engine without the plugin was started without sleep mode.

        vLLM's sleep pauses such an engine, releases no memory, and raises no error.
        """

    @abc.abstractmethod
    def plain_arguments(self, timeout: float) -> dict[str, Any]:
        """Return the result of `arguments` for an engine without the plugin."""

    @abc.abstractmethod
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """See `Engine`."""

    @abc.abstractmethod
    def samples(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """Return a sample for each request, in order; abort the requests after `timeout`."""

    def death(self) -> str:
        """See `Backend`."""
        return ""


def without_sleep_mode() -> ConfigError:
    """Return the error for a release of an engine that was started without sleep mode."""
    return ConfigError(
        "the engine was started without sleep mode, so its memory cannot be released: start it "
        "with enable_sleep_mode=True (option --enable-sleep-mode of a server)"
    )


def _kept(keep_weights: bool) -> list[bool]:
    """Return the last argument of a release or a resume, which older plugins do not accept."""
    return [] if keep_weights else [False]
