"""The receiver's side: tensors in the memory of another process."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from memsaver._memory.sharing import peers
from memsaver._runtime.native import _C
from memsaver.errors import SharingError

__all__ = ["Place", "is_imported", "name_of", "rebuild"]


class Place(NamedTuple):
    """The place of a tensor's memory in the process that sent it."""

    endpoint: str
    token: int
    tag: str
    span_address: int
    span_bytes: int
    address: int
    nbytes: int
    ids: tuple[int, ...]  # of the extents under it
    device: str  # see name_of


def name_of(device: int) -> str:
    """Return a device's name, which is the same in every process: its UUID, or its number on the
    simulated driver. Creates no context.
    """
    return _names()[device]


@functools.cache
def _is_simulated() -> bool:
    return _C.driver_info()[2]


@functools.cache
def _names() -> tuple[str, ...]:
    if _is_simulated():
        return tuple(str(number) for number in range(_C.device_count()))
    import torch

    return tuple(
        str(torch.cuda.get_device_properties(number).uuid)
        for number in range(torch.cuda.device_count())
    )


def _ordinal(place: Place) -> int:
    if place.device not in _names():
        raise SharingError(
            f"a tensor of tag {place.tag!r} cannot be imported: this process does not see the GPU "
            f"{place.device} that has its memory (see CUDA_VISIBLE_DEVICES)",
            tag=place.tag,
        )
    return _names().index(place.device)


def rebuild(
    kind: Any,
    dtype: Any,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,
    _device: object,
    packed: tuple[Any, ...],
) -> Any:
    """Return a tensor in the sent memory. Pickles of sent tensors call this function.

    Raises:
        SharingError: the sender has ended, its tag is paused, the memory was freed, or this process
            cannot map it.
    """
    import torch

    place = Place(*packed)
    memory = _memory(place)
    storage = memory.storage(torch)
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor.requires_grad = requires_grad
    return tensor


class _Memory:
    """Imported memory, which stays mapped while this object exists. Its tensors keep the object.

    torch creates a tensor from it through the CUDA array interface. On the simulated driver, it
    owns a buffer.
    """

    _end: Callable[[], None] | None = None  # set by __init__, which a signal can interrupt

    def __init__(self, place: Place, ordinal: int, peer: peers.Peer) -> None:
        self.nbytes, self.ordinal = place.nbytes, ordinal
        use = peers.Use(place, ordinal)
        self._end = functools.partial(peer.end, use)  # also if the wait is interrupted
        self.address = peer.begin(use)

    def __del__(self) -> None:  # faster than weakref.finalize
        if self._end is not None:
            self._end()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def storage(self, torch: Any) -> Any:
        if _is_simulated():
            array = (ctypes.c_char * self.nbytes).from_address(self.address)
            array._memory = self  # type: ignore[attr-defined]  # the tensor keeps the array, and the array keeps this object
            return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        device = torch.device("cuda", self.ordinal)
        storage = torch.as_tensor(self, device=device).untyped_storage()
        if storage.data_ptr() != self.address:
            raise SharingError(
                f"torch copied memory of another process to {device} instead of using it"
            )
        return storage


def _memory(place: Place) -> _Memory:
    """Return the memory of a sent tensor, used once for all its tensors in this process.

    Two threads may each begin a use of the same memory; each then ends its own.
    """
    known = (place.endpoint, place.token, place.ids)
    memory = _memories.get(known)
    if memory is not None:
        return memory
    peer = peers.peer_at(place.endpoint, place.tag)
    ordinal = _ordinal(place)
    memory = _memories[known] = _Memory(place, ordinal, peer)
    return memory


def is_imported(address: int) -> bool:
    """Return whether an address lies in memory of another process."""
    return peers.is_foreign(address)


_memories: weakref.WeakValueDictionary[Any, _Memory] = weakref.WeakValueDictionary()
