"""Pickling, saving and sending tensors in regions.

memsaver registers functions in two of Python's registries: in `copyreg`, for pickles and
`torch.save`, and in `multiprocessing.reduction`, for sending to other processes. The registries are
keyed by exact type; other tensor types (such as DTensor) contain registered ones. memsaver replaces
nothing in torch, except for one function if a region is shareable (see `sending.cover`).

- Pickling and saving read the contents, so they fail for a paused tensor.
- Sending shares the memory itself. CUDA IPC has no handle for memory that can be paused, so
  memsaver sends tensors in shareable regions itself (`memsaver._memory.sharing`), and sending fails
  for tensors of any other region. The simulator's tensors behave in the same way.

A library that registers later has priority and may not call these functions. In this case torch
raises its own errors (`CUDA error: invalid argument`), and `memsaver.explain(tensor)` explains
them.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import sys
from collections.abc import Callable
from typing import Any

from memsaver._memory.sharing import sending
from memsaver.errors import InvalidStateError

__all__ = ["register"]

_PROTOCOL = 4  # torch's result does not depend on it; a registered function does not get it

_registered = False
# By type. The first entry for a type stays; there is no lock, because a finalizer could need it
# again.
_sending: dict[type, _Sending] = {}
_pickling: dict[type, _Pickling] = {}


def register(torch: Any) -> None:
    """Register checks of tensors that are pickled or sent.

    Has an effect once per process. Any thread may call it.

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
    """Reduce a tensor as if no function were registered."""
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
        found = None if shares else sending.located(tensor)
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
    """Sends tensors in shareable regions, rejects those of other regions, and passes all other
    tensors to the previously registered function.
    """

    def __init__(self, otherwise: Callable[[Any], Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, tensor: Any) -> Any:
        return sending.reduce_any(tensor, self._otherwise)
