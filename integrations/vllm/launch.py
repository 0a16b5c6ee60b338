"""Starts an `AsyncLLM` in the leader's process, on the GPUs of its tensor-parallel group."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.latches import Latch
from memsaver._runtime.timeouts import check_timeout
from memsaver.errors import ConfigError, NotLoadedError

from ..engine.errors import EngineError, EngineTimeoutError
from ..engine.fields import is_whole
from ..engine.loops import LoopThread
from ..engine.placement import VISIBLE, Gpu, Placement, Sizes, by_host
from ..engine.processes import Descendant, descendants_of, kill
from .async_engine import AsyncEngine
from .backend import VLLMBackend

__all__ = ["launch", "launch_node", "place", "sizes_of"]

_TP_SIZE = "tensor_parallel_size"  # the argument for the number of tensor-parallel ranks

# The variables of the ranks' own group, which an engine's processes would mistake for their own.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")

# The trainer has started CUDA in this process, so that vLLM's processes must not be forked.
_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

_DEFAULT_ARGUMENTS = {
    "skip_tokenizer_init": True,
    "enable_sleep_mode": True,
    # The log-probabilities with which tokens were sampled, as a trainer needs them.
    "logprobs_mode": "processed_logprobs",
}


def sizes_of(arguments: Mapping[str, Any], ranks: int | None) -> Sizes:
    """Return the number of ranks from an engine's arguments.

    Args:
        arguments: the arguments of `launch`.
        ranks: the number of the trainer's ranks, all of which the engine uses by default and which
            its ranks may not exceed; None for no limit.

    Raises:
        ConfigError: the argument is not a number of ranks, or exceeds the limit.
    """
    width = arguments.get(_TP_SIZE, ranks or 1)
    if not is_whole(width) or width < 1 or (ranks is not None and width > ranks):
        rest = f", but the mesh's tensor-parallel groups have {ranks} ranks" if ranks else ""
        raise ConfigError(f"invalid number of ranks: {_TP_SIZE}={width!r}{rest}")
    return Sizes(width)


def place(gpus: Sequence[Gpu | None], dp_rank: int, sizes: Sizes | None = None) -> Placement:
    """Return the placement of an engine.

    Args:
        gpus: the GPUs of the group's ranks, in the engine's order.
        dp_rank: the engine's number; vLLM chooses free ports itself.
        sizes: the number of the engine's ranks, which its placement does not depend on.

    Raises:
        ConfigError: the ranks are on several hosts, two ranks use the same GPU, or only some ranks
            have a GPU.
    """
    hosts = by_host(gpus)
    if len(hosts) > 1:
        raise ConfigError(
            f"the ranks of a vLLM engine must be on one host, not on {len(hosts)}: start a server "
            "on several hosts, and pass its URL to RolloutEngine.connect"
        )
    return Placement({}, ",".join(gpu.name for gpu in hosts[0]) if hosts else None)


def launch(
    placement: Placement, tp_size: int | None, arguments: Mapping[str, Any], timeout: float
) -> VLLMBackend:
    """Start an engine.

    Restores this process's environment afterwards. The engine's event loop runs in a thread.

    Args:
        placement: the engine's GPUs.
        tp_size: the number of tensor-parallel ranks; None leaves it to `arguments`.
        arguments: the arguments of vLLM's `AsyncEngineArgs`, and `sleep_level`, the `level` of
            `SleepController`. They override the placement and the defaults for rollouts.
        timeout: seconds until the engine must be ready; after that its processes are ended.
            vLLM's work in this process before it starts them, such as a download of the model, is
            not limited.

    Raises:
        NotLoadedError: vLLM is not installed.
        ConfigError: an argument contradicts the ranks or is unknown to vLLM, or the timeout is
            invalid.
        EngineError, EngineTimeoutError: the engine did not start in time. Its processes are ended.
    """
    check_timeout(timeout)
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise NotLoadedError(f"vLLM is needed to start an engine: {error}") from error
    full = {**_DEFAULT_ARGUMENTS, **placement.arguments, **arguments}
    level = full.pop("sleep_level", 1)
    if tp_size is not None and full.setdefault(_TP_SIZE, tp_size) != tp_size:
        raise ConfigError(
            f"{_TP_SIZE}={full[_TP_SIZE]}, but the mesh's tensor-parallel groups have "
            f"{tp_size} ranks"
        )
    deadline = time.monotonic() + timeout
    # The thread of the loop also starts the engine's processes, which end with it.
    loop = LoopThread()
    before = set(multiprocessing.active_children())

    def start() -> Any:
        arguments_of = loop.run(lambda: AsyncEngineArgs(**full))
        return loop.run(lambda: AsyncLLM.from_engine_args(arguments_of))

    try:
        with _environment(placement.visible):
            engine = _started(start, deadline, timeout, before)
    except BaseException:
        loop.close()
        raise
    started = [one for child in _new(before) for one in descendants_of(child.pid or 0)]
    end = functools.partial(_end, engine, loop, _new(before), started)
    try:
        return VLLMBackend(AsyncEngine(engine, loop.loop), _left(deadline), end, level=level)
    except BaseException:
        end()
        raise


def launch_node(
    placement: Placement, tp_size: int, arguments: Mapping[str, Any], timeout: float
) -> Callable[[], None]:
    """Raise `ConfigError`: an engine on several hosts is not started here. See `place`."""
    raise ConfigError("the ranks of a vLLM engine must be on one host")


def _started(start: Callable[[], Any], deadline: float, timeout: float, before: set[Any]) -> Any:
    """Return the result of `start`. If it fails or is late, end the processes that it started."""
    done = Latch()

    def watch() -> None:
        if not done.wait(_left(deadline)):
            kill(_new(before))  # vLLM waits for the processes, and notices their end

    try:
        with signals_deferred():
            threading.Thread(target=watch, name="memsaver-engine-start", daemon=True).start()
        return start()
    except BaseException as error:
        done.open()
        kill(_new(before))
        if not isinstance(error, Exception):
            raise
        if time.monotonic() >= deadline:
            raise EngineTimeoutError(f"the engine did not start within {timeout:g} s") from error
        if isinstance(error, TypeError | ValueError | AssertionError):
            raise ConfigError(
                f"vLLM does not start with these arguments: {type(error).__name__}: {error}"
            ) from error
        raise EngineError(
            f"the engine did not start: {type(error).__name__}: {error}; its log has details"
        ) from error
    finally:
        done.open()


def _new(before: set[Any]) -> list[Any]:
    """Return this process's children that were started since `before`."""
    return [child for child in multiprocessing.active_children() if child not in before]


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def _end(
    engine: Any,
    loop: LoopThread,
    processes: Sequence[Any],
    started: Sequence[Descendant],
) -> None:
    """End an engine and all of its processes.

    Args:
        engine: the `AsyncLLM`.
        loop: the thread of its event loop, which started its processes.
        processes: its processes.
        started: the processes that these have started.
    """
    try:
        with contextlib.suppress(Exception):  # a dead engine is ended below
            engine.shutdown(timeout=0)
        kill(processes, started)
    finally:
        loop.close()


@contextlib.contextmanager
def _environment(visible: str | None) -> Iterator[None]:
    """Set the environment for an engine's processes in the block, and restore it afterwards."""
    before = dict(os.environ)
    for name in before:
        if name in _TORCHRUN or name.startswith(_TORCHRUN_PREFIXES):
            del os.environ[name]
    os.environ.update({name: text for name, text in _ENVIRONMENT.items() if name not in before})
    if visible is not None:
        os.environ[VISIBLE] = visible
    try:
        yield
    finally:
        for name in set(os.environ).union(before):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
