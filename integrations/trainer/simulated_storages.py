"""Move the storages of CPU tensors that represent CUDA tensors on the simulated driver.

A CPU storage cannot be reallocated in the simulator's memory, so all tensors that share a storage
are found and redirected to a new storage. If a tensor cannot be found, nothing is moved.
"""

from __future__ import annotations

import contextlib
from typing import Any

from memsaver import simulator
from memsaver._memory.regions import region
from memsaver._runtime.text import size_text
from memsaver.errors import InvalidStateError

from .aliases import Aliases
from .holdings import Holding

__all__ = ["SimulatedStorages"]


class SimulatedStorages:
    """Moves memory of CPU tensors, except step counters, which stay on the host even with a GPU."""

    def takes(self, holding: Holding) -> bool:
        """Return whether a tensor would be in device memory if the process used a GPU."""
        return holding.tensor.device.type == "cpu" and not holding.is_counter

    def move(self, tensors: list[Any], tag: str) -> None:
        """Move the storages of tensors, with their contents, into the tag's memory.

        Afterwards, all tensors that use these storages refer to the new memory.

        Raises:
            InvalidStateError: an object other than a Python tensor uses a storage, or a tensor
                rejects the new memory. In the first case, no storage was moved. In the second case,
                only the storages that precede the tensor's storage were moved.
            OutOfDeviceMemoryError: only the storages that precede the failing storage were moved,
                as on a GPU.
        """
        import torch

        with torch._C.DisableTorchFunctionSubclass():  # some subclasses reject these calls
            aliases = Aliases(tensors)
            for at in range(len(tensors)):
                obstacle = aliases.obstacle(at)
                if obstacle is not None:
                    nbytes = tensors[at].untyped_storage().nbytes()
                    raise InvalidStateError(
                        f"a storage of {size_text(nbytes)} cannot be moved into tag {tag!r}, "
                        f"because it {obstacle}; the simulated driver cannot redirect that user. "
                        "Nothing was moved: delete the user or make it refer to a copy, then "
                        "repeat the call",
                        tag=tag,
                    )
            for at in range(len(tensors)):
                _move(tensors[at], aliases.of(at), tag)

    def trim(self, tag: str) -> None:
        """Do nothing, because deleted tensors leave no cached memory on the simulated driver."""


def _move(tensor: Any, users: list[Any], tag: str) -> None:
    """Move a tensor's storage either for all of its users or for none.

    No variable may refer to the storage. An exception's traceback would keep the variable alive,
    and the reference would prevent a later move.
    """
    import torch

    nbytes = tensor.untyped_storage().nbytes()
    with region(tag):
        moved = [simulator.empty(nbytes, torch.uint8).untyped_storage()]
    moved[0].copy_(tensor.untyped_storage())
    before = [tensor.untyped_storage()]
    done: list[Any] = []
    try:
        for user in users:
            _point(user, moved)
            done.append(user)
    except RuntimeError as error:
        for user in done:
            _point(user, before)
        raise InvalidStateError(
            f"a {type(users[len(done)]).__name__} rejects the move of its {size_text(nbytes)} into "
            f"tag {tag!r}: {error}; it and the tensors that share its memory were not moved: "
            "omit them from the call, or make it refer to a copy",
            tag=tag,
        ) from None
    finally:
        before.clear()
        moved.clear()


def _point(tensor: Any, storage: list[Any]) -> None:
    """Make a tensor use the storage in the list; preserve the tensor's version, class and graph."""
    import torch

    is_inference = tensor.is_inference()
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(is_inference))
        modes.enter_context(torch.no_grad())
        modes.enter_context(torch._C._DisableTorchDispatch())
        modes.enter_context(torch._C._AutoDispatchBelowAutograd())
        if not is_inference:
            modes.enter_context(torch.autograd._unsafe_preserve_version_counter(tensor))
        tensor.set_(storage[0], tensor.storage_offset(), tensor.size(), tensor.stride())
