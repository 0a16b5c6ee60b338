"""A trainer's memory on all ranks: its tags, and what torch keeps for itself."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import memsaver
import memsaver.distributed
from memsaver.errors import ConfigError, MemsaverError
from memsaver.handles import state
from memsaver.integrations.trainer import Offloaded, offload
from memsaver.integrations.trainer.offloading import close_all, has_no_backup
from memsaver.native import check_tag

__all__ = ["TrainerMemory"]

_CLOSED = "offload once more, and make a session with that"


class TrainerMemory:
    """The tags of a model, an optimizer and what goes with it. Calls are collectives of a group.

    Attributes:
        model: the model's tag alone.
        others: the optimizer's, and those that go and come with it.
        device: the index of the device that is meant where one is.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        group: Any,
        tags: Sequence[str],
        backup: str | None,
        timeout: float,
        offloading: bool,
    ) -> None:
        """See `ColocatedSession`. Where not `offloading`, nothing is put into tags.

        A group of None is this process alone.
        """
        self._group = group
        self._timeout = timeout
        self._handles: list[Offloaded] = []
        self._made: list[Offloaded] = []  # those that the caller did not give
        self.device = _current_device()
        self.model = ""
        if backup == "none":
            raise ConfigError("the trainer's memory needs a backup: its contents are its training")
        if isinstance(tags, str):
            raise ConfigError(f"tags is a sequence of tags, not {tags!r} alone")
        if not isinstance(tags, Iterable):
            raise ConfigError(f"tags is a sequence of tags, not a {type(tags).__name__}")
        others = [check_tag(tag) for tag in tags]
        self.others: tuple[str, ...] = ()
        if offloading:
            _check_backups(others)
            try:
                self._offload(model, optimizer, others, backup)
            except BaseException:
                self.undo()
                raise

    def _offload(self, model: Any, optimizer: Any, others: list[str], backup: str | None) -> None:
        self.model = self._offloaded(model, backup).tag
        if optimizer is not None:
            others.insert(0, self._offloaded(optimizer, backup).tag)
        if self.model in others:
            raise ConfigError(
                f"the model shares tag {self.model!r} with other memory, which is paused earlier "
                "than the model: give the model its own tag",
                tag=self.model,
            )
        self.others = tuple(dict.fromkeys(others))

    def _offloaded(self, target: Any, backup: str | None) -> Offloaded:
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
        """All tags, the model's first."""
        return (self.model, *self.others) if self.model else ()

    def check(self) -> None:
        """Check that the trainer's memory is still guarded, and that a pause would save it.

        Raises:
            InvalidStateError: a handle was closed.
            ConfigError: a tag has no backup.
            UnknownTagError: a tag is unknown.
        """
        for handle in self._handles:
            handle.check_open(_CLOSED)
        _check_backups(self.tags)

    def pause(self, *names: str) -> Any:
        """Pause these on all ranks, or on none; None where there is nothing to be paused."""
        if not names:
            return None
        if self._group is None:
            return memsaver.pause(*names)
        return memsaver.distributed.pause(*names, group=self._group, timeout=self._timeout)

    def resume(self, *names: str) -> Any:
        """Resume these on all ranks, or on none; None where there is nothing to be resumed."""
        if not names:
            return None
        if self._group is None:
            return memsaver.resume(*names)
        return memsaver.distributed.resume(*names, group=self._group, timeout=self._timeout)

    def synchronize(self) -> None:
        """Wait for all work of this rank's device; errors of kernels come out here."""
        torch = _torch_with_cuda()
        if torch is not None:
            torch.cuda.synchronize(self.device)

    def empty_cache(self) -> None:
        """Give the driver what torch keeps for later."""
        torch = _torch_with_cuda()
        if torch is not None:
            torch.cuda.empty_cache()

    def undo(self) -> None:
        """Take away the hooks that this has made, and leave those of the caller's handles."""
        for handle in self._made:
            with contextlib.suppress(MemsaverError):  # what led here says more
                handle.close()

    def close(self) -> None:
        """Remove the hooks of all handles; after an error, of none.

        Raises:
            InvalidStateError: a tag is paused.
        """
        close_all(self._handles)
        self._group = None  # a group keeps torch's store alive


def _check_backups(tags: Sequence[str]) -> None:
    """Refuse tags whose contents a pause would lose."""
    for tag in tags:
        state(tag)  # known
        if has_no_backup(tag):
            raise ConfigError(
                f"tag {tag!r} has no backup, so a pause would lose the trainer's contents: give it "
                f'a backup, by offload(..., backup="host") or memsaver.region({tag!r}, '
                'backup="host")',
                tag=tag,
            )


def _torch_with_cuda() -> Any:
    """Return the module torch if it has used CUDA, else None."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _current_device() -> int:
    torch: Any = sys.modules.get("torch")
    usable = torch is not None and torch.cuda.is_available() and not memsaver.simulator.active()
    return int(torch.cuda.current_device()) if usable else 0
