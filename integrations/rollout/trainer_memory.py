"""`TrainerMemory`: the tags with a trainer's memory on all ranks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import memsaver
import memsaver.distributed
from memsaver._runtime.native import Backup, check_tag
from memsaver._transitions.handles import state
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError

from ..engine.held import torch_with_cuda
from ..trainer import Offloaded, offload
from ..trainer.offloading import close_all, has_no_backup

__all__ = ["TrainerMemory"]

_CLOSED = "call offload again, and create a new session with the handle"


class TrainerMemory:
    """The tags of a model and its optimizer, and further tags of the trainer.

    All methods are collective calls of a group.

    Attributes:
        model: the model's tag.
        others: the optimizer's tag, and the tags that are paused and resumed with it.
        device: the index of the trainer's device.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        group: Any,
        tags: Sequence[str],
        backup: Backup | None,
        timeout: float,
        offloading: bool,
    ) -> None:
        """See `ColocatedSession`. Without `offloading`, no memory is moved to tags.

        If `group` is None, only this process takes part.
        """
        self._group = group
        self._timeout = timeout
        self._is_closed = False
        self._handles: list[Offloaded] = []
        self._made: list[Offloaded] = []  # handles that were created here, not by the caller
        self._overlapping: list[Offloaded] = []  # the model's and the optimizer's handle
        self.device = _current_device()
        self.model = ""
        if backup == "none":
            raise ConfigError("the trainer's memory needs a backup: a rollout would lose it")
        if isinstance(tags, str):
            raise ConfigError(f"tags must be a sequence of tags, not the single tag {tags!r}")
        if not isinstance(tags, Iterable):
            raise ConfigError(f"tags must be a sequence of tags, not a {type(tags).__name__}")
        others = [check_tag(tag) for tag in tags]
        self.others: tuple[str, ...] = ()
        if offloading:
            _check_backups(others)
            try:
                self._offload(model, optimizer, others, backup)
            except BaseException:
                self.undo()
                raise

    def _offload(
        self, model: Any, optimizer: Any, others: list[str], backup: Backup | None
    ) -> None:
        handles = [self._offloaded(model, backup)]
        self.model = handles[0].tag
        if optimizer is not None:
            handles.append(self._offloaded(optimizer, backup))
        self._overlapping = [handle for handle in handles if handle.tag not in others]
        others[:0] = [handle.tag for handle in handles[1:]]
        if self.model in others:
            raise ConfigError(
                f"the model shares tag {self.model!r} with memory that is paused before the model: "
                "give the model its own tag",
                tag=self.model,
            )
        self.others = tuple(dict.fromkeys(others))

    def _offloaded(self, target: Any, backup: Backup | None) -> Offloaded:
        if isinstance(target, Offloaded):
            handle = target
            handle.check_open(_CLOSED)
        else:
            handle = offload(target, backup=backup)
            self._made.append(handle)
        _check_backups([handle.tag])
        self._handles.append(handle)
        return handle

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags, with the model's tag first."""
        return (self.model, *self.others) if self.model else ()

    @property
    def awaited(self) -> tuple[str, ...]:
        """The tags whose memory is used only by calls that wait until the memory is resumed.

        The order is that of `tags`.
        """
        tags = dict.fromkeys(handle.tag for handle in self._overlapping)
        return tuple(t for t in tags if all(h.may_overlap for h in self._handles if h.tag == t))

    def begin_resume(self, tag: str) -> memsaver.Transition:
        """Begin resuming one of the `awaited` tags on this rank. See `Offloaded.resume`."""
        handle = next(h for h in self._overlapping if h.tag == tag)
        return handle.resume(wait=False)

    def check(self) -> None:
        """Check that all handles are open, and that a pause would back up the trainer's memory.

        Raises:
            InvalidStateError: the session or a handle was closed.
            ConfigError: a tag has no backup.
            UnknownTagError: a tag is unknown.
        """
        if self._is_closed:
            raise InvalidStateError("the session is closed: create a new one")
        for handle in self._handles:
            handle.check_open(_CLOSED)
        _check_backups(self.tags)

    def pause(self, *names: str) -> Any:
        """Pause tags on all ranks, or on none. Returns None if there are no tags."""
        if not names:
            return None
        if self._group is None:
            return memsaver.pause(*names)
        return memsaver.distributed.pause(*names, group=self._group, timeout=self._timeout)

    def resume(self, *names: str) -> Any:
        """Resume tags on all ranks, or on none. Returns None if there are no tags."""
        if not names:
            return None
        if self._group is None:
            return memsaver.resume(*names)
        return memsaver.distributed.resume(*names, group=self._group, timeout=self._timeout)

    def synchronize(self) -> None:
        """Wait until this rank's device has finished all work; raise the errors of its kernels."""
        torch = torch_with_cuda()
        if torch is not None:
            torch.cuda.synchronize(self.device)

    def undo(self) -> None:
        """Remove this object's own hooks, but keep the hooks of the caller's handles."""
        for handle in self._made:
            with contextlib.suppress(MemsaverError):  # the original error is more specific
                handle.close()

    def close(self) -> None:
        """Remove the hooks of all handles; if an exception is raised, no hooks are removed.

        Raises:
            InvalidStateError: a tag is paused.
        """
        close_all(self._handles)
        self._is_closed = True
        self._group = None  # a group keeps torch's store alive


def _check_backups(tags: Sequence[str]) -> None:
    """Raise `ConfigError` for a tag whose contents a pause would lose."""
    for tag in tags:
        state(tag)  # raises if the tag is unknown
        if has_no_backup(tag):
            raise ConfigError(
                f"tag {tag!r} has no backup, so a pause would lose the trainer's contents: choose "
                f'a backup with offload(..., backup="host") or memsaver.region({tag!r}, '
                'backup="host")',
                tag=tag,
            )


def _current_device() -> int:
    torch: Any = sys.modules.get("torch")
    usable = torch is not None and torch.cuda.is_available() and not memsaver.simulator.active()
    return int(torch.cuda.current_device()) if usable else 0
