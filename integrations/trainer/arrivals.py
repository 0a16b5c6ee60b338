"""Run background resumes, and make the hooks of optimizers and modules wait for them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import memsaver
from memsaver import simulator
from memsaver._memory.torch_mode import torch_pools
from memsaver._runtime.native import _C
from memsaver._runtime.timeouts import seconds_until
from memsaver.errors import InvalidStateError, MemsaverError

__all__ = [
    "await_arrival",
    "begin_arrival",
    "forget_arrival",
    "limited_waits",
    "order_after_arrival",
]


class Arrival(NamedTuple):
    """A background resume, and the devices that contain memory of its tag."""

    transition: memsaver.Transition
    devices: tuple[int, ...]


# By tag, the last resume that `begin_arrival` began, until the tag is mapped or paused again. A
# failed resume stays recorded until a hook has raised its error. Changed only by single, atomic
# calls.
_arrivals: dict[str, Arrival] = {}


class Limit(NamedTuple):
    """The limit in seconds, and the deadline as a value of time.monotonic()."""

    seconds: float
    deadline: float


_limit: ContextVar[Limit | None] = ContextVar("limit", default=None)


@contextlib.contextmanager
def limited_waits(seconds: float) -> Iterator[None]:
    """Limit how long hooks wait for background resumes during the block.

    During the block, hooks wait on the host until the resume ends. A hook that still waits
    `seconds` after the beginning of the block raises an `InvalidStateError` that names the tag. The
    resume continues.
    """
    outer = _limit.set(Limit(seconds, time.monotonic() + seconds))
    try:
        yield
    finally:
        _limit.reset(outer)


def begin_arrival(tag: str, *, until_queued: bool = False) -> memsaver.Transition:
    """Begin a background resume of a tag. See `Offloaded.resume`.

    Args:
        until_queued: whether to return only when all copies are queued. If True, the copies of
            later resumes run after the copies of this resume.
    """
    arrival = memsaver.resume(tag, wait=False)
    devices = (int(row["device"]) for row in _C.stats(tag))
    _arrivals[tag] = Arrival(arrival, tuple(device for device in devices if device >= 0))
    if memsaver.state(tag) == "mapped":  # its callbacks may have run before it was recorded
        forget_arrival(tag)
    elif until_queued:
        try:
            arrival.wait_memory([])
        except MemsaverError:
            forget_arrival(tag)
            raise
    return arrival


def forget_arrival(tag: str) -> None:
    """Remove the record of a tag's resume when the tag is mapped or about to be paused."""
    _arrivals.pop(tag, None)


@contextlib.contextmanager
def _ending(tag: str, arrival: memsaver.Transition) -> Iterator[None]:
    """Forget the arrival if it fails in the block; suppress the exception if the tag is mapped.

    If the tag is mapped, the exception came from a callback, and `Transition.wait` raises it again.
    Other exceptions propagate, such as those of signal handlers.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, MemsaverError) and not _has_raised(arrival, error):
            raise
        forget_arrival(tag)
        if memsaver.state(tag) != "mapped":
            raise


def _has_raised(arrival: memsaver.Transition, error: Exception) -> bool:
    """Return whether a transition is done and has raised this error."""
    if not arrival.done():
        return False
    try:
        arrival.wait()
    except Exception as own:
        return type(own) is type(error) and own.args == error.args
    return False


def order_after_arrival(tag: str, memory: list[Any] | None = None) -> bool:
    """Make work that this thread submits later wait for the tag's background resume.

    If `memory` is a list of tensors in the tag, the later work waits only for the contents of these
    tensors. On each of the tag's devices, work on torch's current stream waits on the device. The
    host itself waits only until the copies are queued, except in two cases: during a capture, when
    it waits for all copies, and on the simulated driver, where the host uses the tensors.

    Returns:
        False if the tag is mapped, or if no background resume is known.

    Raises:
        InvalidStateError: see `limited_waits`.
        MemsaverError: the resume failed. The tag is paused with its backup. Raised once.
    """
    known = _arrivals.get(tag)
    if known is None or memsaver.state(tag) == "mapped":
        return False
    arrival, limit = known.transition, _limit.get()
    if limit is not None:
        _wait_until(limit, tag)
    with _ending(tag, arrival):
        pools = torch_pools(required=False)
        if pools is not None and pools.is_capturing():
            arrival.wait()
        elif pools is None or simulator.active():
            arrival.wait() if memory is None else arrival.wait_memory(memory)
        else:
            cuda = pools.torch.cuda
            for device in known.devices:
                with cuda.device(device):  # the default stream is that of the current device
                    arrival.wait_stream(cuda.current_stream(), memory=memory)
    return True


def _wait_until(limit: Limit, tag: str) -> None:
    """Wait for the tag's background resume. See `limited_waits`."""
    # Whole milliseconds, for the error's message. A negative value would mean no limit.
    left = math.ceil(seconds_until(limit.deadline, 0) * 1000) / 1000
    try:
        with _C.Reservation([tag], left):  # a transition in progress has reserved its tags
            pass
    except InvalidStateError as error:
        if time.monotonic() >= limit.deadline:
            error.message += f" (all waits of the call together may take {limit.seconds:g} s)"
        raise


def await_arrival(tag: str) -> None:
    """Wait on the host for the end of the tag's background resume, if any.

    Raises:
        MemsaverError: see `order_after_arrival`.
    """
    known = _arrivals.get(tag)
    if known is not None:
        with _ending(tag, known.transition):
            known.transition.wait()
