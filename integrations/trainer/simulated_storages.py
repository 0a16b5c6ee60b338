"""Moving the storages of CPU tensors, which stand for CUDA tensors on the simulated driver.

CPU storages cannot take memory of the simulator in place, so every tensor that shares a storage is
found and pointed to a new one. If one cannot be found, nothing is moved.
"""

from __future__ import annotations

import contextlib
from typing import Any

from memsaver import simulator
from memsaver.errors import InvalidStateError
from memsaver.integrations.trainer.aliases import Aliases
from memsaver.integrations.trainer.holdings import Holding
from memsaver.regions import region
from memsaver.text import size_text

__all__ = ["SimulatedStorages"]


class SimulatedStorages:
    """The memory of CPU tensors but for step counters, which on a GPU are on the host."""

    def takes(self, holding: Holding) -> bool:
        """Whether a tensor would be in device memory on a GPU."""
        return holding.tensor.device.type == "cpu" and not holding.is_counter

    def move(self, tensors: list[Any], tag: str) -> None:
        """Give all tensors over the storages of some tensors memory of the tag, with its contents.

        Raises:
            InvalidStateError: something that is no Python tensor uses a storage: nothing is moved;
                or a tensor cannot be given other memory: storages before its own are moved.
            OutOfDeviceMemoryError: as on a GPU, storages before that one are moved.
        """
        import torch

        with torch._C.DisableTorchFunctionSubclass():  # by which some classes refuse all this
            aliases = Aliases(tensors)
            for at in range(len(tensors)):
                obstacle = aliases.obstacle(at)
                if obstacle is not None:
                    nbytes = tensors[at].untyped_storage().nbytes()
                    raise InvalidStateError(
                        f"memory of {size_text(nbytes)} that is to go into tag {tag!r} {obstacle}; "
                        "the simulated driver cannot move that along, and has moved nothing: "
                        "delete it, or have it refer to a copy, and do the same again",
                        tag=tag,
                    )
            for at in range(len(tensors)):
                _move(tensors[at], aliases.of(at), tag)

    def trim(self, tag: str) -> None:
        """Deleted tensors leave nothing behind here."""


def _move(tensor: Any, users: list[Any], tag: str) -> None:
    """Move the storage of a tensor for all its users, or for none of them.

    An exception's traceback keeps variables, and a variable would keep the storage from being moved
    later: there is none for it.
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
            f"a {type(users[len(done)]).__name__} over {size_text(nbytes)} that are to go into tag "
            f"{tag!r} cannot be given other memory: {error}; it and all that shares its memory "
            "stay where they are: leave them out, or have it refer to a copy",
            tag=tag,
        ) from None
    finally:
        before.clear()
        moved.clear()


def _point(tensor: Any, storage: list[Any]) -> None:
    """Give a tensor the storage in the list; its version, kind and graph stay as they are."""
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
