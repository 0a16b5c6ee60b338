"""The receiver's side, which creates tensors in the memory of another process."""

from __future__ import annotations

import ctypes
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from memsaver._memory.sharing import peers, wire
from memsaver._memory.sharing.uses import Place, Use
from memsaver._runtime.native import _C
from memsaver.errors import SharingError

__all__ = ["first_uses", "is_imported", "name_of", "rebuild", "rebuild_named"]


first_uses: list[Callable[[Any], None]] = []
"""Functions to call with the module torch before tensors are created in imported memory."""


def name_of(device: int) -> str:
    """Return a device's name, which is the same in every process.

    The name is the device's UUID or, on the simulated driver, the device's number. Creates no
    context.
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


def rebuild(*reduced: Any) -> Any:
    """Return a tensor in the sent memory. Unpickling a sent tensor calls this function.

    Args:
        reduced: see `sending.reduce`.

    Raises:
        SharingError: the sender has ended, its tag is paused, the memory was freed, or this process
            cannot map the memory.
    """
    ((_, tensor),) = rebuild_named([("", reduced)])
    return tensor


def rebuild_named(named: Sequence[tuple[str, Sequence[Any]]]) -> list[tuple[str, Any]]:
    """Return named tensors in sent memory, all of them or none.

    For each tag and device, one message round trip suffices for up to `wire.MOST_TOKENS` storages.

    Args:
        named: the tensors' names, and the arguments of `rebuild` for each.

    Raises:
        SharingError: see `rebuild`.
    """
    import torch

    for function in first_uses:
        function(torch)
    places = [Place(*reduced[-1]) for _, reduced in named]
    memories = _memories_at(places)
    return [
        (name, _tensor(torch, memory, *reduced[:-1]))
        for (name, reduced), memory in zip(named, memories, strict=True)
    ]


def _tensor(
    torch: Any,
    memory: _Memory,
    kind: Any,
    dtype: Any,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    requires_grad: bool,
    _device: object,
) -> Any:
    storage = memory.storage(torch)
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, offset, size, stride)
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    tensor.requires_grad = requires_grad
    return tensor


class _UseEnd:
    """An object whose deletion records the end of a use of sent memory.

    There must be no weak reference to this object. While `__del__` runs, a weak reference would
    still return the object, and another thread could use the memory after the use has ended.
    """

    _use: Use | None = None  # set last by __init__, which a signal can interrupt

    def __init__(self, use: Use, peer: peers.Peer) -> None:
        self._peer = peer
        self._use = use

    def __del__(self) -> None:  # faster than weakref.finalize
        if self._use is not None:
            self._peer.end(self._use)


class _Memory:
    """Imported memory, which stays mapped while this object exists. Tensors in this memory keep the
    object alive.

    torch creates a tensor from this object through the CUDA array interface. On the simulated
    driver, torch creates the tensor from a buffer over the memory instead.
    """

    def __init__(self, use: Use, ordinal: int, peer: peers.Peer) -> None:
        self.nbytes, self.ordinal = use.place.nbytes, ordinal
        self._use = use
        self._end = _UseEnd(use, peer)

    @property
    def address(self) -> int:
        return self._use.address

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
            array._memory = self  # type: ignore[attr-defined]  # kept by the tensor
            return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        device = torch.device("cuda", self.ordinal)
        storage = torch.as_tensor(self, device=device).untyped_storage()
        if storage.data_ptr() != self.address:
            raise SharingError(
                f"torch copied memory of another process to {device} instead of using it"
            )
        return storage


def _memories_at(places: Sequence[Place]) -> list[_Memory]:
    """Return the memory of sent tensors. Tensors in the same memory share one `Use`.

    If two threads begin a `Use` of the same memory, each thread ends its own `Use`.
    """
    found: dict[_Key, _Memory] = {}
    missing: dict[tuple[str, str, str], dict[_Key, Place]] = {}  # by process, tag and device
    for place in places:
        key = _key(place)
        memory = _memories.get(key)
        if memory is not None:
            found[key] = memory
        else:
            missing.setdefault((place.endpoint, place.tag, place.device), {})[key] = place
    for group in missing.values():
        for at in range(0, len(group), wire.MOST_TOKENS):
            found.update(_begun(dict(itertools.islice(group.items(), at, at + wire.MOST_TOKENS))))
    _memories.update(found)
    return [found[_key(place)] for place in places]


def _begun(places: dict[_Key, Place]) -> dict[_Key, _Memory]:
    """Begin uses of one tag's memory on one device, and return the mapped memory."""
    first = next(iter(places.values()))
    peer = peers.peer_at(first.endpoint, first.tag)
    ordinal = _ordinal(first)
    uses = {key: Use(place) for key, place in places.items()}
    # These objects end their uses, even if the wait is interrupted.
    begun = {key: _Memory(use, ordinal, peer) for key, use in uses.items()}
    peer.begin(list(uses.values()), ordinal)
    return begun


def _key(place: Place) -> _Key:
    return place.endpoint, place.token, place.ids


def is_imported(address: int) -> bool:
    """Return whether an address is in memory of another process."""
    return peers.is_foreign(address)


_Key = tuple[str, int, tuple[int, ...]]

_memories: weakref.WeakValueDictionary[_Key, _Memory] = weakref.WeakValueDictionary()
