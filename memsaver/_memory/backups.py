"""Backups: views of their contents, and the release of memory that is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from memsaver._memory import costs
from memsaver._runtime.background import Job
from memsaver._runtime.native import _C, check_tag, emit_warnings
from memsaver.errors import ConfigError, NotLoadedError

if TYPE_CHECKING:
    import torch

__all__ = ["Trim", "backup_view", "trim"]


def backup_view(tensor: Any, writable: bool = False, retained: bool = False) -> torch.Tensor:
    """Return the saved contents of a tensor whose tag is paused, as a CPU tensor, without a copy.

    The view has the tensor's shape, strides and dtype. It is valid until the tag's next change: a
    resume, a pause, the deletion of its tensors; with `retained`, also a trim.

    Args:
        tensor: a tensor of a paused tag, or a view of one.
        writable: False creates a view whose in-place operations, and those of its views, raise
            InvalidStateError; results computed from it are ordinary tensors. True creates an
            ordinary tensor, whose contents the resume restores.
        retained: True views the copy that a mapped tag's last pause saved, at the same host
            address. The view shows the contents at that pause, and writes to it are never restored.

    Raises:
        ConfigError: the tensor's memory is in no region.
        InvalidStateError: the tag is not paused, or was paused without a backup, or with one on
            disk or on another GPU. With `retained`: the tag is not mapped, or no copy of the tensor
            is retained.
        NotLoadedError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise NotLoadedError(
            "backup_view returns torch tensors, and torch is not installed"
        ) from None
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"backup_view takes a torch tensor, not {type(tensor).__name__}")
    if tensor.numel() == 0:
        view = torch.empty_like(tensor, device="cpu")
    else:
        items = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        saved = _C.backup_view(tensor.data_ptr(), items * tensor.element_size(), writable, retained)
        flat = torch.frombuffer(saved, dtype=tensor.dtype, count=items)
        view = flat.as_strided(tuple(tensor.shape), tensor.stride(), 0)
        costs.backup_seen(tensor.data_ptr())
    if writable:
        return view
    from memsaver._memory.readonly import read_only

    return read_only(view)


class Trim(Job[int]):
    """Release host memory on a separate thread; `wait()` returns the number of released bytes.

    An error that no `wait` delivers becomes a `MemsaverWarning` when this object is deleted.
    """

    def __init__(self, tags: Sequence[str] = ()) -> None:
        super().__init__("trim", "the release of host memory", partial(_trim, tags))


@overload
def trim(*, wait: Literal[False] = False, tags: str | Sequence[str] = ()) -> Trim: ...


@overload
def trim(*, wait: Literal[True], tags: str | Sequence[str] = ()) -> int: ...


def trim(*, wait: bool = False, tags: str | Sequence[str] = ()) -> Trim | int:
    """Release the memory and file space of backups, except those of paused tags.

    memsaver keeps this memory for the next pause. The release takes a while, because unpinning
    waits for the devices' work, so the release runs in the background. It owns one tag at a time; a
    call that needs this tag waits.

    Args:
        wait: True waits and returns the released bytes; False returns a handle whose `wait()` does.
        tags: the tag, or tags, whose backups are released; an empty sequence means every tag's, and
            the memory that backups share.

    Raises:
        ConfigError: an invalid tag.
        UnknownTagError: a tag that no region has ever named (without `wait`, raised by the handle).
    """
    names = [check_tag(tag) for tag in ([tags] if isinstance(tags, str) else tags)]
    if not wait:
        return Trim(names)
    try:
        return _trim(names)
    finally:
        emit_warnings()


def _trim(tags: Sequence[str]) -> int:
    return _C.trim_tags(list(tags)) if tags else _C.trim()
