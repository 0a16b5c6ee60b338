"""Pickling, saving and sending tensors of regions.

memsaver registers functions in two of Python's registries: in `copyreg`, for pickles and
`torch.save`, and in `multiprocessing.reduction`, for sending to other processes. The registries are
keyed by exact type; other tensor types (such as DTensor) contain registered ones. memsaver replaces
nothing in torch, except for one function if a region is shareable (see `sending.cover`).

- Pickling and saving read the contents, so they fail for a paused tensor.
- Sending shares the memory itself. CUDA IPC has no handle for memory that can be paused, so
  memsaver sends tensors of shareable regions itself (`memsaver._memory.sharing`), and sending fails
  for tensors of any other region. The simulator's tensors behave in the same way.

A library that registers later has priority and may not call these functions. In this case torch's
own errors appear (`CUDA error: invalid argument`), and `memsaver.explain(tensor)` reports the
reason.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import sys
from collections.abc import Callable
from typing import Any

from memsaver._memory.sharing import importing, sending
from memsaver._runtime.native import _C, STATES, State
from memsaver.errors import ConfigError, InvalidStateError, SharingError

__all__ = ["register"]

_PROTOCOL = 4  # torch's result does not depend on it; a registered function does not receive it

_registered = False
# By type. The first entry for a type stays; there is no lock, because a finalizer could need it
# again.
_sending: dict[type, _Sending] = {}
_pickling: dict[type, _Pickling] = {}


def register(torch: Any) -> None:
    """Register checks of tensors that are pickled or sent. Once per process; any thread.

    Takes no lock: a finalizer or a signal handler may call this during a call of the same thread.
    """
    global _registered
    if _registered:
        return
    importlib.import_module("torch.multiprocessing")  # registers torch's own functions for sending
    # Not imported with memsaver, because it takes a tenth of a second.
    from multiprocessing.reduction import ForkingPickler

    sent = ForkingPickler(io.BytesIO()).dispatch_table
    ways = copyreg.dispatch_table
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _sending.setdefault(kind, _Sending(sent[kind])))
        ways[kind] = _pickling.setdefault(kind, _Pickling(ways.get(kind, _reduced)))
    sending.cover(torch)
    _registered = True


def _reduced(tensor: Any) -> Any:
    """Reduce a tensor as if nothing was registered."""
    return tensor.__reduce_ex__(_PROTOCOL)


class _Pickling:
    """Rejects tensors whose contents cannot be read now; passes other tensors to the previously
    registered function.
    """

    def __init__(self, otherwise: Callable[[Any], Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, tensor: Any) -> Any:
        # A shallow copy uses the same registry, and shares the memory without reading it.
        shares = sys._getframe(1).f_globals.get("__name__") == "copy"
        found = None if shares else _located(tensor)
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
    """Sends tensors of shareable regions, rejects those of other regions, and passes all other
    tensors to the previously registered function.
    """

    def __init__(self, otherwise: Callable[[Any], Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, tensor: Any) -> Any:
        return sent(tensor, self._otherwise)


def sent(tensor: Any, otherwise: Callable[[Any], Any]) -> Any:
    """Reduce a tensor for another process: without a copy if its region is shareable.

    Args:
        tensor: any tensor.
        otherwise: reduces tensors that are in no region.

    Raises:
        ConfigError: the tensor's region is not shareable.
        SharingError: the memory belongs to another process; or see
            `memsaver._memory.sharing.sending.reduce`.
    """
    found = _located(tensor)
    if found is None:
        if importing.is_imported(_address(tensor)):
            raise SharingError(
                "a tensor that another process sent cannot be forwarded: send a copy, "
                "tensor.clone(), or let the process that created it send it"
            )
        return otherwise(tensor)
    tag, state = found
    if sending.is_shareable(tag):
        return sending.reduce(tensor, tag)
    first = "" if state == "mapped" else f"after memsaver.resume({tag!r}) "
    raise ConfigError(
        f"a tensor of tag {tag!r} cannot be sent to another process: its memory can be paused, and "
        f"CUDA IPC has no handle for such memory; create it with memsaver.region({tag!r}, "
        f"shareable=True), or {first}send a copy: " + _copy(),
        tag=tag,
    )


def _copy() -> str:
    if _C.driver_info()[2]:
        return "tensor.clone() (on the simulated driver tensor.cpu() is the tensor itself)"
    return (
        "tensor.cpu(), or on the GPU tensor.clone() under memsaver.disabled(), or create the "
        "tensor under memsaver.disabled()"
    )


def _located(tensor: Any) -> tuple[str, State] | None:
    """Return the tag and its state for a tensor's memory; None for other memory."""
    address = _address(tensor)
    if not address or not _C.owns(address):
        return None
    found = _C.locate(address)
    return None if found is None else (found[0], STATES[found[2]])


def _address(tensor: Any) -> int:
    """Return the address of a tensor's memory; 0 if it has none of its own."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except Exception:
        return 0  # sparse, on the meta device, or a subclass
