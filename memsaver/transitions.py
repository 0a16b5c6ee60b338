"""Pause and resume."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from memsaver import observers
from memsaver.errors import InvalidStateError, MemsaverWarning
from memsaver.native import _C, STATES, State, backup_code, check_tag, emit_warnings
from memsaver.torch_mode import torch_pools

__all__ = ["Change", "Report", "pause", "paused", "resume", "state"]


@dataclass(frozen=True)
class Change:
    """What a pause or a resume did to one tag on one device.

    Attributes:
        tag: the tag.
        device: the device's index; -1 for a tag without memory.
        changed: False where it was in the wanted state already.
        device_bytes: device memory given back, or taken.
        copied_bytes: bytes moved to the backup, or from it.
    """

    tag: str
    device: int
    changed: bool
    device_bytes: int
    copied_bytes: int


@dataclass(frozen=True)
class Report:
    """What a pause or a resume did.

    Attributes:
        seconds: how long it took, callbacks included.
        changes: each tag on each device.
    """

    seconds: float
    changes: tuple[Change, ...]

    @property
    def bytes(self) -> int:
        """Device memory given back, or taken, in total."""
        return sum(change.device_bytes for change in self.changes)

    @property
    def copied_bytes(self) -> int:
        """Bytes moved to the backups, or from them, in total."""
        return sum(change.copied_bytes for change in self.changes)

    @property
    def changed(self) -> tuple[str, ...]:
        """The tags whose state changed, in the order of the call."""
        return tuple(dict.fromkeys(change.tag for change in self.changes if change.changed))


def pause(*tags: str, backup: str | None = None) -> Report:
    """Give the device memory of `tags` back; their addresses stay reserved.

    All or nothing: after an error every tag is mapped with its contents. Waits until the devices
    have done all work submitted before the call. Until the resume, touching the memory is an
    illegal access; deleting its tensors is fine. Pausing what is paused does nothing and says so.

    Args:
        tags: which ones; none at all means every tag.
        backup: "none" or "host", for this call, instead of what the regions said.

    Only blocks that a tensor owns are saved. Contents that are not saved read as zero after the
    resume.

    Raises:
        UnknownTagError: no region ever named it.
        ConfigError: an unknown backup.
        InvalidStateError: inside a region of one of the tags, or a CUDA graph capture.
        OutOfHostMemoryError: no host memory for the backup.
        DriverError: a driver call failed.
    """
    start = time.perf_counter()
    code = backup_code(backup)
    names = [check_tag(tag) for tag in tags]
    pools = torch_pools(required=False)
    if pools is not None and pools.is_capturing():
        raise InvalidStateError(
            "nothing can be paused while a CUDA graph is captured on this stream: replays would "
            "use the memory; pause before or after the capture"
        )
    selected = _selected(names)
    with _serialised(selected):
        going = [name for name in selected if state(name) is State.MAPPED]
        saved = any(_C.tag_backup(name) if code < 0 else code for name in going)
        announced = []
        try:
            for name in going:
                announced.append(name)
                observers.announce_pause(name)
            changes = _C.changes()
            dead = pools.dead_ranges() if pools is not None and saved else []
            rows = _C.pause(selected, code, dead, changes) if selected else []
        except BaseException as error:
            # By what happened, not by the exception: an interrupt may come when all is done.
            for name in announced:
                if state(name) is State.MAPPED:
                    _announce_after(error, name)
            raise
        finally:
            emit_warnings()
    return Report(time.perf_counter() - start, tuple(Change(*row) for row in rows))


def resume(*tags: str) -> Report:
    """Map memory behind the addresses of `tags` again, and bring back what was saved.

    All or nothing: after an error every tag is paused as before, with its backup, and holds no
    device memory; the same call may be made again. Resuming what is mapped does nothing and says
    so.

    Args:
        tags: which ones; none at all means every tag.

    Raises:
        UnknownTagError: no region ever named it.
        OutOfDeviceMemoryError: the memory is not there; the error says how much is needed and free.
        DriverError: a driver call failed.
    """
    start = time.perf_counter()
    names = [check_tag(tag) for tag in tags]
    selected = _selected(names)
    with _serialised(selected):
        waiting = [name for name in selected if state(name) is State.PAUSED]
        try:
            rows = _C.resume(selected) if selected else []
            changes = tuple(Change(*row) for row in rows)
        finally:
            # By what happened, not by how it ended: an interrupt may come when all is done.
            _announce_all([name for name in waiting if state(name) is State.MAPPED])
            emit_warnings()
    return Report(time.perf_counter() - start, changes)


@contextlib.contextmanager
def paused(*tags: str, backup: str | None = None) -> Iterator[Report]:
    """Pause `tags` for the block and resume those that it paused, also after an exception.

    Yields the pause's report. Errors are those of `pause` and `resume`.
    """
    going: tuple[str, ...] = ()
    selected = _selected([check_tag(tag) for tag in tags])
    try:
        with _serialised(selected):
            mapped = [name for name in selected if state(name) is State.MAPPED]
            try:
                report = pause(*tags, backup=backup)
            finally:
                # By what happened: an interrupt may come when all is done.
                going = tuple(name for name in mapped if state(name) is State.PAUSED)
        yield report
    finally:
        still = [name for name in going if state(name) is State.PAUSED]
        if still:
            resume(*still)


def state(tag: str) -> State:
    """The state of a tag.

    Raises:
        UnknownTagError: no region ever named it.
    """
    return STATES[_C.tag_state(check_tag(tag))]


def _selected(names: list[str]) -> list[str]:
    if names:
        for name in names:
            state(name)  # raises for an unknown one before anybody is told of a pause
        return list(dict.fromkeys(names))
    return list(dict.fromkeys(str(row["tag"]) for row in _C.stats()))


@contextlib.contextmanager
def _serialised(names: list[str]) -> Iterator[None]:
    """Callbacks and transition of a tag are one step: no other thread's come between.

    A thread gets all tags of a call at once, so that calls cannot wait for each other. A callback
    may pause and resume further tags, unless that would mean to wait for another thread.
    """
    me = threading.get_ident()

    def taken() -> list[str]:
        return [name for name in names if _holders.get(name, (me, 0))[0] != me]

    with _free:
        if taken() and any(holder == me for holder, _ in _holders.values()):
            raise InvalidStateError(
                f"another thread is pausing or resuming {', '.join(map(repr, taken()))}, and this "
                "one is in the middle of a transition itself (a callback?), which cannot wait"
            )
        _free.wait_for(lambda: not taken())
        for name in names:
            _holders[name] = (me, _holders.get(name, (me, 0))[1] + 1)
    try:
        yield
    finally:
        with _free:
            for name in names:
                depth = _holders[name][1] - 1
                if depth:
                    _holders[name] = (me, depth)
                else:
                    del _holders[name]
            _free.notify_all()


_free = threading.Condition()
_holders: dict[str, tuple[int, int]] = {}  # tag -> thread and depth


def _announce_after(error: BaseException, tag: str) -> None:
    """Tell callbacks that a tag stays mapped; theirs are not the errors that count."""
    try:
        observers.announce_resume(tag)
    except Exception as second:
        warnings.warn(
            f"a callback for tag {tag!r} failed after the pause had failed ({error}): {second!r}",
            MemsaverWarning,
            stacklevel=4,
        )


def _announce_all(tags: list[str]) -> None:
    first: BaseException | None = None
    for tag in tags:
        try:
            observers.announce_resume(tag)
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
