"""Explain an address, to debug illegal accesses."""

from __future__ import annotations

import operator
import time
from dataclasses import dataclass
from typing import Any

from memsaver._inspection.statistics import Range
from memsaver._memory.sharing import sending
from memsaver._memory.torch_mode import torch_pools
from memsaver._runtime.native import _C, STATES, State
from memsaver._runtime.text import size_text
from memsaver.errors import ConfigError

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True)
class Explanation:
    """The description of an address. `str()` returns the description as text.

    Attributes:
        address: the address.
        tag: the tag of the memory, or None for memory that memsaver did not allocate. If None, the
            attributes that describe the tag are not set.
        device: the device's index.
        state: the tag's state.
        allocation: the live allocation that contains the address, or None.
        in_segment: whether the allocation is a torch segment, which torch divides into blocks for
            tensors.
        tensor: the memory block of the live tensor that contains the address, or None if torch
            reports no such tensor.
        since: when the tag entered its state (for example, when it was paused), as a `time.time()`
            value.
        seconds: the time from `since` to the creation of this object.
        thread: the native id (`threading.get_native_id()`) of the thread whose call changed the
            tag's state. If the tag was never paused, this is the id of the thread that created the
            tag.
        caller: where in the program that call was made, and the thread's name; "" for a call from
            outside Python.
        in_host_memory: whether the argument was a CPU tensor whose memory memsaver did not
            allocate.
    """

    address: int
    tag: str | None = None
    device: int | None = None
    state: State | None = None
    allocation: Range | None = None
    in_segment: bool = False
    tensor: Range | None = None
    since: float | None = None
    seconds: float | None = None
    thread: int | None = None
    caller: str = ""
    in_host_memory: bool = False

    @property
    def offset(self) -> int:
        """The address's offset, in bytes, in the tensor or, if there is none, in the allocation."""
        around = self.tensor or self.allocation
        return self.address - around.address if around is not None else 0

    def __str__(self) -> str:
        if self.tag is None or self.since is None or self.state is None:
            reason = (
                "the tensor is on the CPU, so pauses do not affect it"
                if self.in_host_memory
                else "no tag has reserved this address"
            )
            return f"{self.address:#x} is not memsaver's: {reason}"
        return (
            f"{self.address:#x} {self._place()} of tag {self.tag!r} on device {self.device}; the "
            f"tag {_STANDING[self.state]} for {self.seconds:.3f} s, since {_clock(self.since)}, by "
            f"{f'{self.caller} ({self.thread})' if self.caller else f'thread {self.thread}'}; "
            f"{self._advice(self.tag, self.state)}"
        )

    def _place(self) -> str:
        if self.allocation is None:
            return "lies in no live allocation (it was freed or never allocated), in addresses"
        allocation = f"an allocation of {size_text(self.allocation.bytes)} at"
        if self.tensor is not None:
            return (
                f"lies {self.offset} bytes into a tensor of {size_text(self.tensor.bytes)} at "
                f"{self.tensor.address:#x}, in {allocation} {self.allocation.address:#x}"
            )
        lies = "lies in no live tensor, " if self.in_segment else "lies "
        return f"{lies}{self.offset} bytes into {allocation} {self.allocation.address:#x}"

    def _advice(self, tag: str, state: State) -> str:
        if self.allocation is None or (self.in_segment and self.tensor is None):
            return "it must not be used: look for a tensor that was deleted too early"
        if state == "mapped":
            if sending.is_shareable(tag):
                return "it may be used, and sent to other processes"
            return (
                "it may be used; CUDA IPC cannot share it: send other processes a copy, or make "
                "its region shareable"
            )
        if state == "paused":
            return (
                f"nothing may access it before memsaver.resume({tag!r}): no kernel, no copy, "
                "nothing that saves or sends it"
            )
        return "nothing may access it before the transition is over and the tag is resumed"


_STANDING = {
    "mapped": "has been mapped",
    "saving": "is being paused",
    "paused": "has been paused",
    "restoring": "is being resumed",
}


def explain(address_or_tensor: Any) -> Explanation:
    """Describe an address: its tag, its tensor, its state, and the call that paused the tag.

    This function makes no driver calls, so it still works after an illegal access, when the CUDA
    context is lost. `compute-sanitizer` and `cuda-gdb` report the address of an illegal access.

    Args:
        address_or_tensor: a device address, or an object with a `data_ptr()`, such as a tensor.

    Raises:
        ConfigError: the argument is neither an address nor a tensor.
        InvalidStateError: the process is a forked child, which cannot use the parent's memory.
    """
    address = _address_of(address_or_tensor)
    found = _C.locate(address)
    if found is None:
        device = getattr(address_or_tensor, "device", None)
        return Explanation(address, in_host_memory=getattr(device, "type", None) == "cpu")
    tag, device, state, start, nbytes, since, thread, caller = found
    allocation = Range(start, nbytes) if nbytes else None
    in_segment, tensor = _tensor_around(address) if allocation else (False, None)
    return Explanation(
        address=address,
        tag=tag,
        device=device,
        state=STATES[state],
        allocation=allocation,
        in_segment=in_segment,
        tensor=Range(*tensor) if tensor is not None else None,
        since=since,
        seconds=max(time.time() - since, 0.0),
        thread=thread,
        caller=caller,
    )


def _address_of(named: Any) -> int:
    try:
        pointer = getattr(named, "data_ptr", None)
        address = operator.index(pointer() if callable(pointer) else named)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError if a tensor has no memory
        raise ConfigError(
            f"explain takes a device address or a tensor, not {type(named).__name__}"
        ) from None
    if not 0 <= address < 1 << 64:
        raise ConfigError(f"{address:#x} is not an address")
    return address


def _tensor_around(address: int) -> tuple[bool, tuple[int, int] | None]:
    try:
        pools = torch_pools(required=False)
        return pools.tensor_around(address) if pools is not None else (False, None)
    except Exception:
        # torch may fail in any way once its context is lost; the other fields are still valid.
        return False, None


def _clock(seconds: float) -> str:
    fraction = int(seconds % 1 * 1000)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + f".{fraction:03}"
