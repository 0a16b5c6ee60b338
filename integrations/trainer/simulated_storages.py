"""Moving the storages of CPU tensors, which stand for CUDA tensors on the simulated driver.

CPU storages cannot take memory of the simulator in place, so every tensor that shares a storage is
found and pointed to a new one. Where one cannot be found, nothing is moved.
"""

from __future__ import annotations

import gc
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from memsaver import simulator
from memsaver.errors import InvalidStateError
from memsaver.integrations.trainer.holdings import Holding
from memsaver.regions import region

__all__ = ["SimulatedStorages"]


class SimulatedStorages:
    """The memory of CPU tensors but for step counters, which on a GPU are on the host."""

    def takes(self, holding: Holding) -> bool:
        """Whether a tensor would be in device memory on a GPU."""
        return holding.tensor.device.type == "cpu" and not holding.is_counter

    def move(self, storages: list[Any], tag: str) -> None:
        """Give all tensors over each storage memory of the tag, with its contents.

        Raises:
            InvalidStateError: something that is no Python tensor shares a storage: nothing moved.
            OutOfDeviceMemoryError: as on a GPU, storages before that one are moved.
        """
        users = _users({storage._cdata for storage in storages})
        own_count = _own_count()
        for storage in storages:
            if _uses(storage) - own_count > len(users[storage._cdata]):
                raise InvalidStateError(
                    f"something holds a storage of {storage.nbytes()} bytes that is to go into tag "
                    f"{tag!r}, and is no tensor that Python's collector knows ({_who_it_may_be()}),"
                    " so that the simulated driver cannot move it. A GPU has no such limit",
                    tag=tag,
                )
        for storage in storages:
            _move(storage, users[storage._cdata], tag)

    def trim(self, tag: str) -> None:
        """Deleted tensors leave nothing behind here."""


def _move(storage: Any, users: list[Any], tag: str) -> None:
    import torch

    with region(tag):
        moved = simulator.empty(storage.nbytes(), torch.uint8).untyped_storage()
    moved.copy_(storage)
    for tensor in users:
        with torch.inference_mode(tensor.is_inference()):  # a tensor stays of its kind
            view = torch.empty(0, dtype=tensor.dtype)
            view.set_(moved, tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = view


def _who_it_may_be() -> str:
    if gc.get_freeze_count():
        return "one made before gc.freeze(), or a graph of autograd's: gc.unfreeze(), or let it go"
    return "a graph of autograd's, say: let it go first"


def _users(ids: set[int]) -> dict[int, list[Any]]:
    """All tensors of the process over some storages, by the storage's id."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    kinds = set(_kinds(torch.Tensor))
    things = gc.get_objects()
    found: dict[int, list[Any]] = defaultdict(list)
    # There are hundreds of thousands, so no Python code is run for each.
    for tensor in itertools.compress(things, map(kinds.__contains__, map(type, things))):
        if is_traceable_wrapper_subclass(tensor):
            continue
        try:
            with torch._C.DisableTorchFunctionSubclass():  # which some classes refuse it by
                storage_id = tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            continue  # it has none
        if storage_id in ids:
            found[storage_id].append(tensor)
    return found


def _kinds(kind: type) -> Iterator[type]:
    """A class and all that are derived from it."""
    yield kind
    derived: type
    for derived in type.__subclasses__(kind):
        yield from _kinds(derived)


def _uses(storage: Any) -> int:
    import torch

    return int(torch._C._storage_Use_Count(storage._cdata))


def _own_count() -> int:
    """What a storage without a tensor counts, when Python has it."""
    import torch

    return _uses(torch.empty(1).untyped_storage())
