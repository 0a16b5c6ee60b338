"""Pause, resume and swap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, overload

from memsaver._memory.choices import check_chosen
from memsaver._memory.mempools import check_unused
from memsaver._memory.torch_mode import torch_pools
from memsaver._runtime.blocks import block
from memsaver._runtime.native import _C, Backup, backup_code, check_tag, emit_warnings
from memsaver._transitions.handles import Call, Progress, Transition, state
from memsaver._transitions.reports import Change, Report
from memsaver.errors import ConfigError, InvalidStateError

__all__ = ["Change", "Report", "Transition", "pause", "paused", "resume", "state", "swap"]


@overload
def pause(
    *tags: str,
    backup: Backup | None = None,
    wait: Literal[True] = True,
    progress: Progress = None,
) -> Report: ...


@overload
def pause(
    *tags: str, backup: Backup | None = None, wait: Literal[False], progress: Progress = None
) -> Transition: ...


@overload
def pause(
    *tags: str, backup: Backup | None = None, wait: bool, progress: Progress = None
) -> Report | Transition: ...


def pause(
    *tags: str, backup: Backup | None = None, wait: bool = True, progress: Progress = None
) -> Report | Transition:
    """Release the device memory of `tags`; their addresses stay reserved.

    All or nothing: after an error every tag is mapped with its contents. Waits until the devices
    have completed all work submitted before the call. Until the resume, accessing the memory is an
    illegal access, but the tensors in it may be deleted. Pausing a paused tag does nothing; its
    `Change.changed` is False.

    Args:
        tags: the tags; if empty, all tags.
        backup: "none", "host", "pageable", "disk" or "peer" (see `region`), for this call only,
            instead of the regions' policy.
        wait: False returns a `Transition` as soon as the tags are reserved; the rest happens on
            another thread. The caller must not use the memory after the call.
        progress: `progress(done_bytes, total_bytes)` is called about every 50 ms and at the end, by
            the waiting thread, while another thread does the work; it is never called if there is
            nothing to copy. True shows a bar on stderr. `Transition.wait` describes the effect of
            an exception in the function.

    Only blocks that a tensor owns are saved. Contents that are not saved read as zero after the
    resume (with the option `poison`, as NaN).

    A call that needs a tag of a transition in progress waits for the transition to end. A signal
    handler that raises (Ctrl-C) ends that wait. Later signals do not affect the pause: their
    handlers run after the pause and its callbacks, or, with `progress` or `wait=False`, at once
    while the pause continues. All of this applies to `resume` and `swap` too.

    Raises:
        UnknownTagError: no region has ever named a tag.
        ConfigError: an unknown backup.
        InvalidStateError: a tag of 256 MiB or more would lose its contents, and neither its regions
            nor this call chose a backup. Or the call is inside a region of one of the tags, inside
            `use_mem_pool` of one of their `torch_pool`s, or during a CUDA graph capture. Or the
            wait for a tag would deadlock, because the call is in a callback, a signal handler or a
            finalizer that runs during a transition that must end first.
        TagSharedError: another process used a tensor of one of the tags for longer than the option
            `importer_seconds`.
        OutOfHostMemoryError: not enough host memory for the backup.
        BackupError: the backup could not be written.
        DriverError: a driver call failed.
    """
    return _transition(pause_call(tags, backup), wait, progress)


@overload
def resume(
    *tags: str, restore: bool = True, wait: Literal[True] = True, progress: Progress = None
) -> Report: ...


@overload
def resume(
    *tags: str, restore: bool = True, wait: Literal[False], progress: Progress = None
) -> Transition: ...


@overload
def resume(
    *tags: str, restore: bool = True, wait: bool, progress: Progress = None
) -> Report | Transition: ...


def resume(
    *tags: str, restore: bool = True, wait: bool = True, progress: Progress = None
) -> Report | Transition:
    """Map memory behind the addresses of `tags` again, and restore the saved contents.

    All or nothing: after an error every tag is still paused, with its backup and without device
    memory, and the same call may be made again. Resuming a mapped tag does nothing; its
    `Change.changed` is False.

    Args:
        tags: the tags; if empty, all tags.
        restore: False copies nothing, for contents that are about to be overwritten. The memory
            then reads as if the pause had not saved its contents.
        wait: False returns a `Transition` as soon as the tags are reserved; the rest happens on
            another thread. The memory may be used on the host after its `wait()`, and by work
            submitted to a stream after its `wait_stream(stream)`.
        progress: as in `pause`.

    Raises:
        UnknownTagError: no region has ever named a tag.
        OutOfDeviceMemoryError: not enough device memory is free; the error contains the needed and
            the free bytes.
        InvalidStateError: the wait for a tag would deadlock, as for `pause`.
        BackupError: the backup could not be read.
        DriverError: a driver call failed.
    """
    return _transition(resume_call(tags, restore), wait, progress)


@overload
def swap(
    *,
    out: str | Sequence[str],
    into: str | Sequence[str],
    backup: Backup | None = None,
    wait: Literal[True] = True,
    progress: Progress = None,
) -> Report: ...


@overload
def swap(
    *,
    out: str | Sequence[str],
    into: str | Sequence[str],
    backup: Backup | None = None,
    wait: Literal[False],
    progress: Progress = None,
) -> Transition: ...


@overload
def swap(
    *,
    out: str | Sequence[str],
    into: str | Sequence[str],
    backup: Backup | None = None,
    wait: bool,
    progress: Progress = None,
) -> Report | Transition: ...


def swap(
    *_positional: object,
    out: str | Sequence[str] = (),
    into: str | Sequence[str] = (),
    backup: Backup | None = None,
    wait: bool = True,
    progress: Progress = None,
) -> Report | Transition:
    """Pause `out` and resume `into` in one transition, which transfers pages and copies both ways.

    All or nothing: after an error `out` is still mapped and `into` still paused, with all contents
    that have a backup; contents without one may be lost. A swap takes less time than a pause and a
    resume. It needs little more device memory than the larger side if the physical pieces of both
    sides have equal sizes. A first swap between few large pieces of different sizes may need memory
    for one more piece, and fails without it; in that case, pause and resume separately. Tags of
    `out` that are paused and tags of `into` that are mapped stay unchanged; their `Change.changed`
    is False.

    Args:
        out: the tag, or tags, to pause.
        into: the tag, or tags, to resume.
        backup: as in `pause`, for `out`.
        wait: as in `pause` and `resume`.
        progress: as in `pause`.

    Raises:
        ConfigError: a tag is on both sides, a side has no tags, or a tag is passed without `out=`
            or `into=`.
        MemsaverError: the errors of `pause` and `resume`.
    """
    if _positional:
        raise ConfigError(
            "swap takes its tags by name: swap(out='weights', into='kv_cache') pauses `out` and "
            "resumes `into`"
        )
    return _transition(swap_call(out, into, backup), wait, progress)


@partial(block, asynchronous=True)
def paused(*tags: str, backup: Backup | None = None) -> Iterator[Report]:
    """Pause `tags` during the block, then resume those that were paused, even after an exception.

    Yields the pause's report. Errors are those of `pause` and `resume`. Also works as a decorator,
    even for coroutine functions: both transitions then block the event loop. An interrupt is raised
    after the tags are resumed, even if the resume waits for another thread's transition.
    """
    call = pause_call(tags, backup)
    going: list[str] = []

    def pause_these() -> Report:
        with _C.Reservation(call.names):
            mapped = [name for name in call.out if state(name) == "mapped"]
            try:
                return call.finish()
            finally:
                going.extend(name for name in mapped if state(name) == "paused")

    def resume_these() -> None:
        still = [name for name in going if state(name) == "paused"]
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


def pause_call(tags: Sequence[str], backup: Backup | None) -> Call:
    """Check the arguments of `pause`, and return them as a `Call`. Begins nothing."""
    code = backup_code(backup)
    names = [check_tag(tag) for tag in tags]
    _check_no_capture("paused")
    selected = _selected(names)
    check_unused(selected)
    check_chosen(selected, backup)
    return Call("pause", selected, [], code)


def resume_call(tags: Sequence[str], restore: bool = True) -> Call:
    """Check the arguments of `resume`, and return them as a `Call`. Begins nothing."""
    names = [check_tag(tag) for tag in tags]
    return Call("resume", [], _selected(names), backup_code(None if restore else "none"))


def swap_call(out: str | Sequence[str], into: str | Sequence[str], backup: Backup | None) -> Call:
    """Check the arguments of `swap`, and return them as a `Call`. Begins nothing."""
    code = backup_code(backup)
    going, coming = _side(out, "out"), _side(into, "into")
    both = [name for name in going if name in coming]
    if both:
        raise ConfigError(f"tag {both[0]!r} cannot be both paused and resumed by one swap")
    _check_no_capture("swapped")
    check_unused(going)
    selected = _selected(going), _selected(coming)
    check_chosen(going, backup)
    return Call("swap", *selected, code)


def _transition(call: Call, wait: bool, progress: Progress) -> Report | Transition:
    """Begin the call on this thread, and finish it on this thread or on a new one."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise ConfigError(
            f"progress must be a function of two numbers of bytes, True or None, not {progress!r}"
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
        raise ConfigError(
            f"swap needs tags for `{side}`: swap(out='weights', into='kv_cache') pauses `out` and "
            "resumes `into`; to pause or resume only, use pause or resume"
        )
    return names


def _selected(names: list[str]) -> list[str]:
    if names:
        for name in names:
            state(name)  # raises for an unknown tag, before any callback runs
        return list(dict.fromkeys(names))
    return list(dict.fromkeys(str(row["tag"]) for row in _C.stats()))


def _check_no_capture(what: str) -> None:
    pools = torch_pools(required=False)
    if pools is not None and pools.is_capturing():
        raise InvalidStateError(
            f"nothing can be {what} while a CUDA graph is captured on this stream: replays would "
            f"use the memory; make the call before or after the capture"
        )
