"""Starts an `sglang.Engine` in a leader's process, on the GPUs of its tensor-parallel group."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MappingProxyType
from typing import Any

from memsaver._runtime.timeouts import check_timeout, seconds_until
from memsaver.errors import ConfigError, NotLoadedError

from ..engine.placement import Placement
from ..engine.processes import Parent, Processes
from ..engine.starting import LEAST_SECONDS, environment, started
from .backend import SGLangBackend
from .engines import LocalEngine
from .placement import place, sizes_of
from .settings import policy_variables

__all__ = ["launch", "launch_node", "place", "policy_variables", "sizes_of"]

_TAKEN = (signal.SIGQUIT, signal.SIGTERM)
_TASK_SECONDS = 2.0  # seconds for cancelled tasks to end

# GPUs shared with a trainer do not all have the same amount of free memory.
_DEFAULT_ENVIRONMENT = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
# SGLang reads these variables again later in this process, so they stay set.
_KEPT_PREFIXES = ("SGLANG_", "PROMETHEUS_")

# With this variable, starting a node returns when its schedulers are ready rather than when they
# end.
_NODE = {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}

_LOG = ' (log_level="info")'

_DEFAULT_ARGUMENTS = {"skip_tokenizer_init": True, "enable_memory_saver": True}


def launch(
    placement: Placement,
    tp_size: int | None,
    arguments: Mapping[str, Any],
    timeout: float,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> SGLangBackend:
    """Start an engine.

    Afterwards, restores this process's environment, multiprocessing start method and signal
    handlers. Variables that SGLang sets during its import, and SGLang's own variables (SGLANG_*,
    PROMETHEUS_*), are not restored, because SGLang reads them again. Removes SGLang's signal
    handler, which would kill this process if one of the engine's processes died. Calls raise an
    `EngineError` instead.

    Args:
        placement: the engine's GPUs and ports.
        tp_size: the number of tensor-parallel ranks; None means the size that `arguments` sets.
        arguments: the arguments of `sglang.Engine`. The arguments override the placement and the
            defaults for rollouts.
        timeout: the seconds within which the engine must be ready; otherwise, its processes are
            killed. The timeout does not limit SGLang's work in this process before these processes
            start, such as a download of the model.
        variables: environment variables of the engine, such as the result of `policy_variables`.

    Raises:
        NotLoadedError: SGLang is not installed.
        ConfigError: an argument contradicts the ranks or is unknown to SGLang, or the timeout is
            invalid.
        EngineError, EngineTimeoutError: the engine did not start in time; its processes were
            killed.
    """
    if tp_size is not None and arguments.get("tp_size", tp_size) != tp_size:
        raise ConfigError(
            f"tp_size={arguments['tp_size']}, but the mesh's tensor-parallel groups have "
            f"{tp_size} ranks"
        )
    starting = _starting(placement, tp_size, arguments, timeout, variables)
    with starting as (deadline, engine, signals, parent, processes):
        end = functools.partial(_end, engine, signals, parent, processes)
        try:
            signals.take(engine, seconds_until(deadline, LEAST_SECONDS))
            seconds = seconds_until(deadline, LEAST_SECONDS)
            return SGLangBackend(LocalEngine(engine), seconds, end)
        except BaseException:
            end()
            raise


def launch_node(
    placement: Placement,
    tp_size: int,
    arguments: Mapping[str, Any],
    timeout: float,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[], None]:
    """Start an engine's part on a host other than the first host, which receives all requests.

    Args:
        placement: the part's GPUs, and the address of the first host.
        tp_size: the number of the engine's ranks on all hosts.
        arguments: see `launch`.
        timeout: the seconds within which the whole engine must be ready.
        variables: see `launch`.

    Returns:
        A function that terminates the part's processes; it must be called once.

    Raises:
        NotLoadedError, ConfigError, EngineError, EngineTimeoutError: see `launch`.
    """
    starting = _starting(placement, tp_size, arguments, timeout, {**_NODE, **variables})
    with starting as (_, engine, signals, parent, processes):
        atexit.unregister(engine.shutdown)
        signals.ignore()

        def end() -> None:
            processes.end()
            signals.restore()
            parent.end()

        return end


@contextlib.contextmanager
def _starting(
    placement: Placement,
    tp_size: int | None,
    arguments: Mapping[str, Any],
    timeout: float,
    variables: Mapping[str, str],
) -> Iterator[tuple[float, Any, _Signals, Parent, Processes]]:
    """Start an engine, and run the block with the environment variables of its processes.

    Yields the deadline, the engine, the handlers to restore, the thread that started the engine's
    processes, and the processes. The arguments and errors are the same as for `launch`.
    """
    check_timeout(timeout)
    try:
        import sglang
    except ImportError as error:
        raise NotLoadedError(f"SGLang is needed to start an engine: {error}") from error
    full = {**_DEFAULT_ARGUMENTS, **placement.arguments, **arguments}
    if tp_size is not None:
        full["tp_size"] = tp_size
    full.setdefault("custom_sigquit_handler", engine_failed)
    own = environment(placement.visible, _DEFAULT_ENVIRONMENT, variables, _KEPT_PREFIXES)
    with own, _start_method():
        signals, parent = _Signals(), Parent()
        deadline = time.monotonic() + timeout

        def start() -> tuple[Any, Processes]:
            thread_id = threading.get_native_id()
            return started(lambda: sglang.Engine(**full), thread_id, deadline, "SGLang", _LOG)

        try:
            engine, processes = parent.run(start)
        except BaseException:
            signals.restore()
            raise
        yield deadline, engine, signals, parent, processes


def engine_failed(number: int, frame: FrameType | None) -> None:
    """Ignore SIGQUIT, which a dying engine process sends; waiting calls detect the death."""


def _end(engine: Any, signals: _Signals, parent: Parent, processes: Processes) -> None:
    """Kill an engine's processes; unlike `shutdown`, spare this process's other children.

    Args:
        engine: the `sglang.Engine`.
        signals: the signal handlers of this process, to be restored.
        parent: the thread that started the processes.
        processes: the processes.
    """
    atexit.unregister(engine.shutdown)
    watchdog = getattr(engine.tokenizer_manager, "_subprocess_watchdog", None)
    if watchdog is not None:
        watchdog.stop()
    processes.end()
    rpc = getattr(engine, "send_to_rpc", None)
    if rpc is not None:
        rpc.close(linger=0)
        engine.send_to_rpc = None
    loop = engine.loop
    try:
        if not (loop.is_closed() or loop.is_running()):
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:  # the tasks of a request in flight end after several rounds
                loop.run_until_complete(asyncio.wait(tasks, timeout=_TASK_SECONDS))
            loop.close()
    finally:
        signals.restore()
        parent.end()


class _Signals:
    """This process's signal handlers.

    SGLang's handlers would kill this process if an engine process died. Only the main thread can
    set handlers, so neither SGLang nor this class sets them in other threads.
    """

    def __init__(self) -> None:
        self._mine = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.getsignal(number) for number in _TAKEN}

    def take(self, engine: Any, timeout: float) -> None:
        """Make SGLang set its handlers now, then restore the earlier ones, but ignore SIGQUIT."""
        manager = engine.tokenizer_manager
        manager.signal_handler_class = _Deaf

        async def begin() -> None:
            manager.auto_create_handle_loop()

        LocalEngine(engine).run("its start", begin, timeout)
        if self._mine:
            for number in _TAKEN:
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    engine.loop.remove_signal_handler(number)
            self.ignore()

    def ignore(self) -> None:
        """Restore the earlier handlers, but ignore SIGQUIT."""
        if self._mine:
            self.restore()
            signal.signal(signal.SIGQUIT, engine_failed)

    def restore(self) -> None:
        """Restore the earlier handlers."""
        if self._mine and threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


class _Deaf:
    """A replacement for SGLang's signal handlers, which would kill this process."""

    def __init__(self, manager: Any) -> None:
        pass

    def sigterm_handler(self, *_: Any) -> None:
        """Do nothing."""

    def running_phase_sigquit_handler(self, *_: Any) -> None:
        """Do nothing."""


@contextlib.contextmanager
def _start_method() -> Iterator[None]:
    """Restore multiprocessing's start method after the block."""
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(before, force=True)
