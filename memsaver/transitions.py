"""Pause, resume and swap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, overload

from memsaver.blocks import block
from memsaver.errors import ConfigError, InvalidStateError
from memsaver.handles import Call, Progress, Transition, state
from memsaver.mempools import check_unused
from memsaver.native import _C, State, backup_code, check_tag, emit_warnings
from memsaver.reports import Change, Report
from memsaver.torch_mode import torch_pools

__all__ = ["Change", "Report", "Transition", "pause", "paused", "resume", "state", "swap"]


@overload
def pause(
    *tags: str, backup: str | None = None, wait: Literal[True] = True, progress: Progress = None
) -> Report: ...


@overload
def pause(
    *tags: str, backup: str | None = None, wait: Literal[False], progress: Progress = None
) -> Transition: ...


@overload
def pause(
    *tags: str, backup: str | None = None, wait: bool, progress: Progress = None
) -> Report | Transition: ...


def pause(
    *tags: str, backup: str | None = None, wait: bool = True, progress: Progress = None
) -> Report | Transition:
    """Release the device memory of `tags`; their addresses stay reserved.

    All or nothing: after an error every tag is mapped with its contents. Waits until the devices
    have done all work submitted before the call. Until the resume, accessing the memory is an
    illegal access, but its tensors may be deleted. Pausing a paused tag does nothing, and the
    report says so.

    Args:
        tags: the tags; none at all means every tag.
        backup: "none", "host", "pageable" or "disk" (see `region`), for this call only, instead of
            the regions' policy.
        wait: False returns a `Transition` as soon as the tags are reserved; the rest happens on
            another thread. The memory must not be used from the call on.
        progress: `progress(done_bytes, total_bytes)` is called about every 50 ms and at the end, by
            the thread that waits, while another thread does the work; never if there is nothing to
            copy. True shows a bar on stderr. See `Transition.wait` for a function that raises.

    Only blocks that a tensor owns are saved. Contents that are not saved read as zero after the
    resume (with the option `poison`, as NaN).

    A call that needs a tag of a transition in progress waits for its end. A signal handler that
    raises (Ctrl-C) ends that wait. Later signals do not change the pause: their handlers run after
    the pause and its callbacks, or, with `progress` or `wait=False`, at once while the pause goes
    on. All of this applies to `resume` and `swap` too.

    Raises:
        UnknownTagError: no region ever named a tag.
        ConfigError: an unknown backup.
        InvalidStateError: the call is inside a region of one of the tags, `use_mem_pool` of one of
            its `torch_pool`s, or a CUDA graph capture; or the wait for a tag would never end,
            because the call is in a callback, a signal handler or a finalizer in the middle of a
            transition that must end first.
        OutOfHostMemoryError: no host memory for the backup.
        BackupError: the backup could not be written.
        DriverError: a driver call failed.
    """
    return _transition(pause_call(tags, backup), wait, progress)


@overload
def resume(*tags: str, wait: Literal[True] = True, progress: Progress = None) -> Report: ...


@overload
def resume(*tags: str, wait: Literal[False], progress: Progress = None) -> Transition: ...


@overload
def resume(*tags: str, wait: bool, progress: Progress = None) -> Report | Transition: ...


def resume(*tags: str, wait: bool = True, progress: Progress = None) -> Report | Transition:
    """Map memory behind the addresses of `tags` again, and restore the saved contents.

    All or nothing: after an error every tag is paused as before, with its backup, and holds no
    device memory; the same call may be made again. Resuming a mapped tag does nothing, and the
    report says so.

    Args:
        tags: the tags; none at all means every tag.
        wait: False returns a `Transition` as soon as the tags are reserved; the rest happens on
            another thread. The memory may be used on the host after its `wait()`, and by work
            submitted to a stream after its `wait_stream(stream)`.
        progress: as in `pause`.

    Raises:
        UnknownTagError: no region ever named a tag.
        OutOfDeviceMemoryError: too little device memory is free; the error says how much is needed
            and free.
        InvalidStateError: the wait for a tag would never end, as for `pause`.
        BackupError: the backup could not be read.
        DriverError: a driver call failed.
    """
    return _transition(resume_call(tags), wait, progress)


@overload
def swap(
    *,
    out: str | Sequence[str],
    into: str | Sequence[str],
    backup: str | None = None,
    wait: Literal[True] = True,
    progress: Progress = None,
) -> Report: ...


@overload
def swap(
    *,
    out: str | Sequence[str],
    into: str | Sequence[str],
    backup: str | None = None,
    wait: Literal[False],
    progress: Progress = None,
) -> Transition: ...


@overload
def swap(
    *,
    out: str | Sequence[str],
    into: str | Sequence[str],
    backup: str | None = None,
    wait: bool,
    progress: Progress = None,
) -> Report | Transition: ...


def swap(
    *,
    out: str | Sequence[str],
    into: str | Sequence[str],
    backup: str | None = None,
    wait: bool = True,
    progress: Progress = None,
) -> Report | Transition:
    """Pause `out` and resume `into` at once: memory is handed over, copies go both ways together.

    All or nothing: after an error `out` is mapped and `into` paused as before, with all contents
    that have a backup; those of tags without one may be gone. Takes less time than one after the
    other, and hardly more device memory than the larger side where the pieces of one side fit the
    other's; a first swap of few large pieces for others may need room for one beside them, and
    fails where there is none: then pause and resume in turn. Tags of `out` that are paused and tags
    of `into` that are mapped already are left as they are, and the report says so.

    Args:
        out: the tag, or tags, to pause.
        into: the tag, or tags, to resume.
        backup: as in `pause`, for `out`.
        wait: as in `pause` and `resume`.
        progress: as in `pause`.

    Raises:
        ConfigError: a tag on both sides, or a side without tags.
        MemsaverError: what `pause` and `resume` raise.
    """
    return _transition(swap_call(out, into, backup), wait, progress)


@partial(block, asynchronous=True)
def paused(*tags: str, backup: str | None = None) -> Iterator[Report]:
    """Pause `tags` for the block and resume those that it paused, also after an exception.

    Yields the pause's report. Errors are those of `pause` and `resume`. A decorator too, of
    coroutine functions as well: both transitions keep their event loop waiting. An interrupt is
    raised when the tags are resumed; what that waits for, such as another thread's transition, is
    waited for.
    """
    call = pause_call(tags, backup)
    going: list[str] = []

    def pause_these() -> Report:
        with _C.Reservation(call.names):
            mapped = [name for name in call.out if state(name) is State.MAPPED]
            try:
                return call.finish()
            finally:
                going.extend(name for name in mapped if state(name) is State.PAUSED)

    def resume_these() -> None:
        still = [name for name in going if state(name) is State.PAUSED]
        if still:
            resume(*still)

    try:
        try:
            report = _C.uninterrupted(pause_these)
        finally:
            emit_warnings(stacklevel=5)
        yield report
    finally:
        _C.uninterrupted(resume_these, True)


def pause_call(tags: Sequence[str], backup: str | None) -> Call:
    """The call that `pause` makes, its arguments checked. Nothing is begun."""
    code = backup_code(backup)
    names = [check_tag(tag) for tag in tags]
    _check_no_capture("paused")
    selected = _selected(names)
    check_unused(selected)
    return Call("pause", selected, [], code)


def resume_call(tags: Sequence[str]) -> Call:
    """The call that `resume` makes, its arguments checked. Nothing is begun."""
    names = [check_tag(tag) for tag in tags]
    return Call("resume", [], _selected(names), -1)


def swap_call(out: str | Sequence[str], into: str | Sequence[str], backup: str | None) -> Call:
    """The call that `swap` makes, its arguments checked. Nothing is begun."""
    code = backup_code(backup)
    going, coming = _side(out, "out"), _side(into, "into")
    both = [name for name in going if name in coming]
    if both:
        raise ConfigError(f"tag {both[0]!r} cannot be both paused and resumed by one swap")
    _check_no_capture("swapped")
    check_unused(going)
    return Call("swap", _selected(going), _selected(coming), code)


def _transition(call: Call, wait: bool, progress: Progress) -> Report | Transition:
    """Begin the call on this thread, and finish it here or on a thread of its own."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise ConfigError(
            f"progress is a function of two numbers of bytes, True or None, not {progress!r}"
        )
    try:
        if wait and (progress is None or progress is False):
            return _C.uninterrupted(call.finish)
        handle = _C.uninterrupted(partial(Transition, call, progress))
    finally:
        emit_warnings(stacklevel=4)
    return handle.wait() if wait else handle


def _side(tags: str | Sequence[str], side: str) -> list[str]:
    names = [check_tag(tag) for tag in ([tags] if isinstance(tags, str) else tags)]
    if not names:
        raise ConfigError(f"swap needs a tag to work on: `{side}` names none")
    return names


def _selected(names: list[str]) -> list[str]:
    if names:
        for name in names:
            state(name)  # raises for an unknown one before anybody is told of a pause
        return list(dict.fromkeys(names))
    return list(dict.fromkeys(str(row["tag"]) for row in _C.stats()))


def _check_no_capture(what: str) -> None:
    pools = torch_pools(required=False)
    if pools is not None and pools.is_capturing():
        raise InvalidStateError(
            f"nothing can be {what} while a CUDA graph is captured on this stream: replays would "
            f"use the memory; do it before or after the capture"
        )
