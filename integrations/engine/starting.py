"""Starts an engine's processes in the required environment and within a timeout."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TypeVar

from memsaver._runtime.background import start_daemon
from memsaver._runtime.latches import Latch
from memsaver._runtime.timeouts import seconds_until
from memsaver.errors import ConfigError

from .errors import EngineError, EngineTimeoutError
from .placement import VISIBLE
from .processes import Processes

__all__ = ["LEAST_SECONDS", "environment", "started"]

Result = TypeVar("Result")

LEAST_SECONDS = 1.0  # the minimum time for each step of a start, even after its deadline

# The variables of the ranks' own process group, which an engine would use for its group.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


@contextlib.contextmanager
def environment(
    visible: str | None,
    defaults: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
    kept: Collection[str] = (),
) -> Iterator[None]:
    """Set the environment for an engine's processes during the block, and restore it afterwards.

    Args:
        visible: the GPUs that are visible to the processes; None selects the GPUs of this process.
        defaults: variables to set if they are not set already.
        variables: additional variables to set.
        kept: the prefixes of variables that are not restored after the block.
    """
    before = dict(os.environ)
    for name in before:
        if name in _TORCHRUN or name.startswith(_TORCHRUN_PREFIXES):
            del os.environ[name]
    ours = {name: text for name, text in defaults.items() if name not in before}
    ours |= variables or {}
    if visible is not None:
        ours[VISIBLE] = visible
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in set(os.environ).union(before):
            if name.startswith(tuple(kept)) and name not in ours:
                continue
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def started(
    start: Callable[[], Result], thread_id: int, deadline: float, engine: str, log: str = ""
) -> tuple[Result, Processes]:
    """Call `start`; return its result and the processes that it started.

    Kills these processes if `start` fails. At the deadline, kills them to make `start` fail,
    because an engine waits for its processes and detects their exit.

    Args:
        start: a function that starts the engine.
        thread_id: the native id of the thread on which `start` starts processes.
        deadline: the time by which the engine must be ready, on the clock of `time.monotonic`.
        engine: the name of the kind of engine, for error messages.
        log: a hint about the engine's log, for error messages.

    Raises:
        ConfigError: the engine does not start with these arguments.
        EngineError, EngineTimeoutError: the engine did not start in time.
    """
    timeout = seconds_until(deadline, LEAST_SECONDS)
    processes = Processes(thread_id)
    done = Latch()

    def end() -> None:
        processes.record()
        processes.end()

    def watch() -> None:
        if not done.wait(timeout):
            end()

    try:
        start_daemon("engine-start", watch)
        result = start()
        processes.record()
        return result, processes
    except BaseException as error:
        done.open()
        end()
        if not isinstance(error, Exception):
            raise
        if time.monotonic() >= deadline:
            raise EngineTimeoutError(f"the engine did not start within {timeout:.3g} s") from error
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, TypeError | ValueError | AssertionError):
            raise ConfigError(f"{engine} does not start with these arguments: {text}") from error
        raise EngineError(f"the engine did not start: {text}; its log has details{log}") from error
    finally:
        done.open()
