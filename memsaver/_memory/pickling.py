"""Pickling, saving and sending of tensors in regions.

memsaver registers functions in two of Python's registries: in `copyreg` for pickles and
`torch.save`, and in `multiprocessing.reduction` for sending tensors to other processes. The keys of
both registries are exact types. Other tensor types, such as DTensor, contain tensors of registered
types. memsaver replaces none of torch's functions, except one if a region is shareable (see
`sending.cover`).

- Pickling and saving read the contents, so they wait for a transition in progress, and fail if the
  tensor's tag is paused.
- Sending shares the memory without a copy. CUDA IPC has no handle for memory that can be paused.
  Therefore, memsaver itself sends the tensors of shareable regions (see
  `memsaver._memory.sharing`), and rejects tensors of other regions. Tensors on the simulated driver
  behave the same way; sending their storages fails, as in torch on a GPU.

If another library registers its own functions later, they replace memsaver's and might not call
them. If they do not, torch raises its own errors (`CUDA error: invalid argument`), and
`memsaver.explain(tensor)` shows the cause.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import sys
from collections.abc import Callable
from typing import Any

from memsaver._memory.sharing import importing, sending
from memsaver._runtime.native import _C
from memsaver.errors import InvalidStateError, SharingError

__all__ = ["register"]

_PROTOCOL = 4  # torch's result does not depend on it; a registered function does not receive it

_registered = False
# By type. The first entry for a type stays; there is no lock, because a finalizer could need to
# acquire it again.
_sending: dict[type, _Sending] = {}
_pickling: dict[type, _Pickling] = {}
_storages: dict[type, _Storages] = {}


def register(torch: Any) -> None:
    """Register checks for tensors that are pickled or sent. Thread-safe.

    Only the first call in a process has an effect. This function acquires no lock, because a
    finalizer or a signal handler might call it during another call on this thread.
    """
    global _registered
    if _registered:
        return
    importlib.import_module("torch.multiprocessing")  # registers torch's own functions for sending
    # Not imported with memsaver, because the import takes a tenth of a second.
    from multiprocessing.reduction import ForkingPickler

    sent = ForkingPickler(io.BytesIO()).dispatch_table
    ways = copyreg.dispatch_table
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _sending.setdefault(kind, _Sending(sent[kind])))
        ways[kind] = _pickling.setdefault(kind, _Pickling(ways.get(kind, _reduced)))
    storage = torch.UntypedStorage
    ForkingPickler.register(storage, _storages.setdefault(storage, _Storages(sent[storage])))
    sending.cover(torch)
    _registered = True


importing.first_uses.append(register)  # so that a received tensor cannot be sent again


def _reduced(tensor: Any) -> Any:
    """Reduce a tensor as if no function were registered for its type."""
    return tensor.__reduce_ex__(_PROTOCOL)


class _Pickling:
    """A pickling function that rejects tensors whose contents cannot be read now, and passes other
    tensors to the previously registered function.
    """

    def __init__(self, otherwise: Callable[[Any], Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, tensor: Any) -> Any:
        # A shallow copy uses the same registry, and shares the memory without reading it.
        shares = sys._getframe(1).f_globals.get("__name__") == "copy"
        found = None if shares else sending.settled(tensor)
        if found is not None and found[1] != "mapped":
            tag, state = found
            raise InvalidStateError(
                f"a tensor of tag {tag!r} cannot be pickled or saved while the tag is {state}: its "
                f"contents are not on the device; call memsaver.resume({tag!r}) first, or save "
                "memsaver.backup_view(tensor), a CPU tensor over the contents that a pause with a "
                "backup in host memory saved",
                tag=tag,
            )
        return self._otherwise(tensor)


class _Sending:
    """A sending function that sends tensors of shareable regions, rejects tensors of other regions,
    and passes all other tensors to the previously registered function.
    """

    def __init__(self, otherwise: Callable[[Any], Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, tensor: Any) -> Any:
        return sending.reduce_any(tensor, self._otherwise)


class _Storages:
    """A sending function that rejects storages in regions and storages that another process sent.
    On the simulated driver, torch would move such storages to its own shared memory.
    """

    def __init__(self, otherwise: Callable[[Any], Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, storage: Any) -> Any:
        address = int(storage.data_ptr())
        if address and (_C.owns(address) or importing.is_imported(address)):
            raise SharingError(
                "the storage of a tensor in a region, or of a tensor that another process sent, "
                "cannot be sent to another process: send a tensor of type torch.Tensor"
            )
        return self._otherwise(storage)
