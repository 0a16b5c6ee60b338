"""Views of backups, and the release of unneeded backup memory."""

from __future__ import annotations

import contextlib
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
    """Return the saved contents of a tensor of a paused tag, as a CPU tensor, without copying them.

    The view has the tensor's shape, strides and dtype. The view is valid until the tag is resumed
    or paused, or its tensors are deleted. With `retained`, a trim also invalidates the view.

    Args:
        tensor: a tensor of a paused tag, or a view of such a tensor.
        writable: whether the view can be written to. If False, in-place operations on the view and
            on its own views raise InvalidStateError, and results computed from the view are
            ordinary tensors. If True, the view is an ordinary tensor, and the resume restores the
            contents written to it.
        retained: if True, the tag must be mapped, and the view shows the copy that the tag's last
            pause saved, at the same host address. A resume never restores contents written to
            this view.

    Raises:
        ConfigError: the tensor's memory is in no region, or the tensor is sparse, nested, or a
            conjugated or negated view.
        InvalidStateError: the tag is not paused, or it was paused without a backup, or with a
            backup on disk or on another GPU. If `retained` is True: the tag is not mapped, or no
            copy of the tensor is retained.
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
    if tensor.layout != torch.strided or tensor.is_nested:
        raise ConfigError("backup_view takes a dense tensor, not a sparse or nested one")
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(
            "the backup has the contents of the tensor's memory, and this tensor is a conjugated "
            "or negated view: pass the original tensor, and conjugate or negate the result"
        )
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
    """A release of host memory on a separate thread; `wait()` returns the number of bytes released.

    If the release fails and no `wait` call raises its error, a `MemsaverWarning` reports the error
    when this object is deleted.
    """

    def __init__(self, tags: Sequence[str] = ()) -> None:
        super().__init__("trim", "the release of host memory", partial(_trim, tags))


@overload
def trim(*, wait: Literal[False] = False, tags: str | Sequence[str] = ()) -> Trim: ...


@overload
def trim(*, wait: Literal[True], tags: str | Sequence[str] = ()) -> int: ...


def trim(*, wait: bool = False, tags: str | Sequence[str] = ()) -> Trim | int:
    """Release the memory and file space of all backups except those of paused tags.

    Without this call, memsaver keeps the memory for the next pause. The release is slow, because
    unpinning waits for the devices' work, so it runs in the background by default. The release
    reserves one tag at a time, and other calls that need that tag wait. The release waits for
    allocations and frees in progress, and skips tags that are in a transition.

    Args:
        wait: if True, the call waits for the release and returns the number of bytes released. If
            False, it returns a handle whose `wait()` returns that number.
        tags: the tag, or tags, whose backups are released. An empty sequence means the backups of
            all tags, and the memory that backups share.

    Raises:
        ConfigError: a tag is invalid.
        UnknownTagError: no region has ever named one of the tags. Without `wait`, the handle's
            `wait()` raises this error.
    """
    names = [check_tag(tag) for tag in ([tags] if isinstance(tags, str) else tags)]
    if not wait:
        return Trim(names)
    try:
        released = _trim(names)
    except BaseException:
        with contextlib.suppress(Warning):  # a raised warning must not replace the call's error
            emit_warnings()
        raise
    emit_warnings()
    return released


def _trim(tags: Sequence[str]) -> int:
    return _C.trim_tags(list(tags)) if tags else _C.trim()
