"""Tensors of regions that are pickled, saved, or sent to another process.

Two registries of Python's ask us first, and nothing of torch is replaced: `copyreg`, for pickles
and `torch.save`, and `multiprocessing.reduction`, for what is sent to other processes.
They know tensors and parameters by their exact type; others (a DTensor, say) are made of such.

- Pickling and saving read the contents: a paused tensor is refused.
- Sending shares the memory itself. CUDA IPC has no handle for memory that can be paused, and the
  simulator's tensors stand for such: any tensor of a region is refused.

Whoever registers later comes first and may not ask us: torch's own errors are then what is seen
(`CUDA error: invalid argument`), and `memsaver.explain(tensor)` says why.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import sys
from collections.abc import Callable
from typing import Any

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.native import _C, STATES, State

__all__ = ["register"]

_PROTOCOL = 4  # torch does the same for every one; a registered function is not told which it is

_registered = False
# By type. The first that is made for a type stays: no lock, in which a finalizer could come here.
_sending: dict[type, _Sending] = {}
_pickling: dict[type, _Pickling] = {}


def register(torch: Any) -> None:
    """Ask here before a tensor is pickled or sent, from now on. Once per process; any thread.

    Takes no lock: a finalizer or a signal handler may call it during a call of the same thread.
    """
    global _registered
    if _registered:
        return
    importlib.import_module("torch.multiprocessing")  # registers torch's own way to send
    # Not imported with memsaver: it takes a tenth of a second.
    from multiprocessing.reduction import ForkingPickler

    sent = ForkingPickler(io.BytesIO()).dispatch_table
    ways = copyreg.dispatch_table
    for kind in (torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, _sending.setdefault(kind, _Sending(sent[kind])))
        ways[kind] = _pickling.setdefault(kind, _Pickling(ways.get(kind, _reduced)))
    _registered = True


def _reduced(tensor: Any) -> Any:
    """What is done where nothing is registered."""
    return tensor.__reduce_ex__(_PROTOCOL)


class _Pickling:
    """Refuses a tensor whose contents cannot be read now; others go on as before."""

    def __init__(self, otherwise: Callable[[Any], Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, tensor: Any) -> Any:
        # A shallow copy is made through the same registry, and shares the memory without a look.
        shares = sys._getframe(1).f_globals.get("__name__") == "copy"
        found = None if shares else _located(tensor)
        if found is not None and found[1] is not State.MAPPED:
            tag, state = found
            raise InvalidStateError(
                f"a tensor of tag {tag!r} cannot be pickled or saved while the tag is {state}: its "
                f"contents are not on the device; do it after memsaver.resume({tag!r}), or save "
                "memsaver.backup_view(tensor), a CPU tensor over what a pause with a backup in "
                "host memory kept",
                tag=tag,
            )
        return self._otherwise(tensor)


class _Sending:
    """Refuses a tensor of a region; others go on as before."""

    def __init__(self, otherwise: Callable[[Any], Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, tensor: Any) -> Any:
        found = _located(tensor)
        if found is not None:
            tag, state = found
            first = "" if state is State.MAPPED else f"after memsaver.resume({tag!r}) "
            raise ConfigError(
                f"a tensor of tag {tag!r} cannot be sent to another process: its memory can be "
                f"paused, and CUDA IPC has no handle for such memory; {first}send a copy: "
                + _copy(),
                tag=tag,
            )
        return self._otherwise(tensor)


def _copy() -> str:
    if _C.driver_info()[2]:
        return "tensor.clone() (on the simulated driver tensor.cpu() is the tensor itself)"
    return (
        "tensor.cpu(), or on the GPU tensor.clone() under memsaver.disabled(), or make the tensor "
        "under memsaver.disabled()"
    )


def _located(tensor: Any) -> tuple[str, State] | None:
    """The tag, and its state, of the memory under a tensor; None for memory that is not ours."""
    try:
        address = tensor.untyped_storage().data_ptr()
    except Exception:
        return None  # without memory: sparse, on the meta device, or a subclass's own business
    if not address or not _C.owns(address):
        return None
    found = _C.locate(address)
    return None if found is None else (found[0], STATES[found[2]])
