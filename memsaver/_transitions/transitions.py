"""Pause, resume and swap."""

from __future__ import annotations

import contextlib
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

    The call pauses all tags or none: after an error, every tag is mapped and has its contents. The
    call first waits until the devices have completed all previously submitted work. Until the
    resume, any access to the memory is an illegal access, but the tensors in it can be deleted.
    Pausing a tag that is already paused has no effect, and the tag's `Change.changed` is False.

    Args:
        tags: the tags; if empty, all tags.
        backup: "none", "host", "pageable", "disk" or "peer" (see `region`). This overrides the
            regions' policy for this call only.
        wait: if False, the call returns a `Transition` as soon as the tags are reserved, and
            another thread completes the pause. If other processes use tensors of the tags, the call
            first waits for them, up to the option `importer_seconds`. The caller must not use the
            memory after the call.
        progress: a function that the waiting thread calls as `progress(done_bytes, total_bytes)`,
            about every 50 ms and at the end, while another thread does the work. It is never called
            if there is nothing to copy. True shows a progress bar on stderr. For exceptions raised
            by the function, see `Transition.wait`.

    A pause saves only blocks that a tensor owns. Memory whose contents were not saved reads as zero
    after the resume, or as NaN with the option `poison`.

    If another transition of one of the tags is in progress, the call waits for that transition to
    end. A signal handler that raises (as on Ctrl-C) ends this wait. Signals that arrive after the
    wait do not affect the pause: their handlers run after the pause and its callbacks. With
    `progress` or `wait=False`, the handlers run at once while the pause continues. The same rules
    apply to `resume` and `swap`.

    Raises:
        UnknownTagError: no region has ever named one of the tags.
        ConfigError: the backup is unknown.
        InvalidStateError: the call would discard a total of 256 MiB or more from tags for which
            neither a region nor the call chose a backup. It is also raised if the call is made
            inside a region of one of the tags, inside `use_mem_pool` of one of their `torch_pool`s,
            or during a CUDA graph capture. Finally, it is raised if waiting for a tag would
            deadlock, because a callback, a signal handler or a finalizer makes the call during a
            transition that must end first.
        TagSharedError: another process used a tensor of one of the tags for longer than the option
            `importer_seconds`.
        OutOfHostMemoryError: there is not enough host memory for the backup.
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
    """Map physical memory at the addresses of `tags` again, and restore the saved contents.

    The call resumes all tags or none: after an error, every tag is still paused, with its backup
    and without device memory, and the call can be repeated. Resuming a mapped tag has no effect,
    and the tag's `Change.changed` is False.

    Args:
        tags: the tags; if empty, all tags.
        restore: whether to copy the saved contents. Pass False if the contents are about to be
            overwritten; the memory then reads as if the pause had not saved its contents. If the
            last transition of a tag failed and could not be undone, the memory may still have the
            saved contents.
        wait: if False, the call returns a `Transition` as soon as the tags are reserved, and
            another thread completes the resume. The host can use the memory after
            `Transition.wait()`. Work on a stream can use the memory if it is submitted after
            `Transition.wait_stream(stream)`.
        progress: as in `pause`.

    Raises:
        UnknownTagError: no region has ever named one of the tags.
        OutOfDeviceMemoryError: the device has too little free memory; the error states the bytes
            needed and the bytes free.
        OutOfHostMemoryError: there is not enough host memory for the buffers of a copy.
        InvalidStateError: waiting for a tag would deadlock, as in `pause`.
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

    The call swaps all tags or none: after an error, the tags of `out` are still mapped, and the
    tags of `into` are still paused. Contents that have a backup are intact, but contents without a
    backup may be lost. A swap is faster than a separate pause and resume. If the physical pieces of
    both sides have equal sizes, a swap needs little more device memory than the larger side. The
    first swap between a few large pieces of different sizes can need memory for one additional
    piece, and fails if this memory is not available. If it fails, pause and resume separately. Tags
    of `out` that are already paused and tags of `into` that are already mapped do not change, and
    their `Change.changed` is False.

    Args:
        out: the tag, or tags, to pause.
        into: the tag, or tags, to resume.
        backup: as in `pause`, for `out`.
        wait: as in `pause` and `resume`.
        progress: as in `pause`.

    Raises:
        ConfigError: `out` and `into` share a tag, one of them has no tags, or a tag is passed
            without `out=` or `into=`.
        MemsaverError: see the errors of `pause` and `resume`.
    """
    if _positional:
        raise ConfigError(
            "swap takes its tags by name: swap(out='weights', into='kv_cache') pauses `out` and "
            "resumes `into`"
        )
    return _transition(swap_call(out, into, backup), wait, progress)


@partial(block, asynchronous=True)
def paused(*tags: str, backup: Backup | None = None) -> Iterator[Report]:
    """Pause `tags` for the duration of a block, then resume the newly paused tags, even after an
    exception.

    Yields the pause's report. The errors are the same as for `pause` and `resume`. `paused` is also
    a decorator, even for coroutine functions, for which both transitions block the event loop. If
    an interrupt arrives, it is raised after the tags are resumed, even if the resume must wait for
    another thread's transition.
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
            done: Report | Transition = _C.uninterrupted(call.finish)
        else:
            done = _C.uninterrupted(partial(Transition, call, progress))
    except BaseException:
        with contextlib.suppress(Warning):  # a raised warning must not replace the call's error
            emit_warnings(stacklevel=4)
        raise
    if not isinstance(done, Transition):
        emit_warnings(stacklevel=4)
        return done
    # `Transition.wait` emits the warnings. Here, a raised warning would lose the handle.
    return done.wait() if wait else done


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
