"""Start an `AsyncLLM` in the leader's process, on the GPUs of its tensor-parallel group."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from memsaver._runtime.timeouts import check_timeout, seconds_until
from memsaver.errors import ConfigError, NotLoadedError

from ..engine.fields import is_whole
from ..engine.loops import LoopThread
from ..engine.placement import Gpu, Placement, Sizes, by_host
from ..engine.processes import Processes
from ..engine.starting import LEAST_SECONDS, environment, started
from .async_engine import AsyncEngine
from .backend import VLLMBackend
from .settings import policy_variables

__all__ = ["launch", "place", "policy_variables", "sizes_of"]

_TP_SIZE = "tensor_parallel_size"  # the argument for the number of tensor-parallel ranks

# The trainer has started CUDA in this process, so vLLM's processes must not be forked.
_ENVIRONMENT = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

_DEFAULT_ARGUMENTS = {
    "skip_tokenizer_init": True,
    "enable_sleep_mode": True,
    # A trainer needs the log-probabilities with which tokens were sampled.
    "logprobs_mode": "processed_logprobs",
}


def sizes_of(arguments: Mapping[str, Any], ranks: int | None) -> Sizes:
    """Return the number of ranks that an engine's arguments set.

    Args:
        arguments: the arguments of `launch`.
        ranks: the number of the trainer's ranks, which is both the default and the maximum for the
            number of the engine's ranks; None for no limit.

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
        dp_rank: the engine's index. It is not used, because vLLM chooses free ports itself.
        sizes: ignored, because the placement does not depend on the number of the engine's ranks.

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
    placement: Placement,
    tp_size: int | None,
    arguments: Mapping[str, Any],
    timeout: float,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> VLLMBackend:
    """Start an engine.

    The engine's event loop runs in a thread. This process's environment is restored after the
    start.

    Args:
        placement: the engine's GPUs.
        tp_size: the number of tensor-parallel ranks; None means the number that `arguments` sets.
        arguments: the arguments of vLLM's `AsyncEngineArgs`, and `sleep_level`, the `level` of
            `SleepController`. These arguments override the placement and the defaults for rollouts.
        timeout: the time limit in seconds for the engine's start, after which its processes are
            killed. The limit does not apply to vLLM's work in this process before these processes
            start, such as a download of the model.
        variables: environment variables for the engine, such as those of `policy_variables`.

    Raises:
        NotLoadedError: vLLM is not installed.
        ConfigError: an argument is inconsistent with the ranks or unknown to vLLM, or the timeout
            is invalid.
        EngineError, EngineTimeoutError: the engine did not start in time; its processes were
            killed.
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
    # The loop's thread also starts the engine's processes, which end with it.
    loop = LoopThread()

    def start() -> Any:
        return loop.run(lambda: AsyncLLM.from_engine_args(AsyncEngineArgs(**full)))

    try:
        with environment(placement.visible, _ENVIRONMENT, variables):
            engine, processes = started(start, loop.thread_id, deadline, "vLLM")
    except BaseException:
        loop.close()
        raise
    end = functools.partial(_end, engine, loop, processes)
    try:
        seconds = seconds_until(deadline, LEAST_SECONDS)
        return VLLMBackend(AsyncEngine(engine, loop.loop), seconds, end, level=level)
    except BaseException:
        end()
        raise


def _end(engine: Any, loop: LoopThread, processes: Processes) -> None:
    """Shut an engine down, kill its processes, and stop the thread of its event loop."""
    try:
        with contextlib.suppress(Exception):  # a dead engine's processes are killed below
            engine.shutdown(timeout=0)
        processes.end()
    finally:
        loop.close()
