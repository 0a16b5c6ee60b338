"""Release and resume in SGLang's scheduler processes: all ranks or none, and never the end of one.

SGLang's handlers trust their caller: a busy engine fails an assertion, a tag that is not released
a KeyError, and what the saver raises passes through; each ends the engine. The hooks here stand
around these handlers. They leave out what is done already, refuse what would be fatal, and do the
saver's work themselves, where every rank of a tensor-parallel group learns of every other's failure
before any goes on. SGLang's own handlers then do the rest (caches, model buffers, queues,
bookkeeping), with a saver that does nothing.

| what happens | what holds then, on every rank |
|---|---|
| a release of what is released, a resume of what is not | nothing has changed; no error |
| the engine is busy, or a tag unknown | nothing has changed |
| a release is refused before it is done | mapped, with contents; the KV cache is flushed |
| a release fails later | mapped; contents without a backup may be gone, the KV cache is flushed |
| a resume fails | released as before, with backups; the same call may be made again |

Where the way back fails too, on some ranks, the tags count as released, and the answer names the
ranks that hold memory of them still (`Answer.held`). They give it back at the next release of the
tags, or have it at the next resume.

The result travels in the answer to the tokenizer manager, whose methods return the answers of all
schedulers, or raise. It is part of the server information, too. Pipeline stages decide each for
itself. An engine whose saver is not memsaver's gets the checks only, and one whose handlers are not
as expected nothing at all: it is not guarded.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from memsaver.errors import ConfigError
from memsaver.integrations.sglang import handlers, moves
from memsaver.integrations.sglang.errors import EngineBusyError
from memsaver.integrations.sglang.protocol import (
    RELEASE_ORDER,
    RESUME_ORDER,
    WEIGHTS,
    Answer,
    Failure,
    RankReport,
    SchedulerState,
)
from memsaver.integrations.sglang.ranks import Group, first_failure
from memsaver.integrations.sglang.updaters import resume_of, updater_of

__all__ = ["add_state", "release", "resume"]

_LAST = "_memsaver_last_answer"  # of a scheduler
_NAME = "_memsaver_name"  # of a scheduler
_logger = logging.getLogger("memsaver.sglang")


def release(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.release_memory_occupation`."""
    return _answered("release", RELEASE_ORDER, _release, original, updater, request)


def resume(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.resume_memory_occupation`."""
    return _answered("resume", RESUME_ORDER, _resume, original, updater, request)


def _answered(
    operation: str,
    order: Sequence[str],
    work: Callable[..., Any],
    original: Callable[..., Any],
    updater: Any,
    request: Any,
) -> Any:
    """What both begin with, then `work(original, updater, request, asked tags, answer)`."""
    if handlers.is_running(updater) or not handlers.is_as_expected(updater):
        return original(updater, request)
    answer = _Answering(updater, operation)
    try:
        asked = handlers.asked_tags(request, order)
    except ConfigError as error:
        return answer.refused(error)
    return work(original, updater, request, asked, answer)


def _release(
    original: Callable[..., Any],
    updater: Any,
    request: Any,
    asked: Sequence[str],
    answer: _Answering,
) -> Any:
    group = Group(updater.tp_cpu_group)
    tags = [tag for tag in asked if tag not in updater.offload_tags]
    if not moves.are_memsavers(RELEASE_ORDER):
        return _release_by_another(original, updater, request, tags, answer)

    # What is released may have memory on some rank: see the end of `resume`.
    ranks = group.attempt(
        lambda: handlers.check_idle(updater) if tags or moves.is_mapped(asked) else None
    )
    if first_failure(ranks):
        return answer.failed(asked, ranks)
    if tags:
        ranks = group.attempt(lambda: _prepare_release(original, updater, request, tags))
    if not first_failure(ranks):
        ranks = moves.pause(group, asked)
    if not first_failure(ranks):
        gave = [tag for tag in asked if tag in tags or _is_moved(tag, ranks)]
        return answer.done(gave, ranks, held=answer.held - set(asked))
    if not tags:
        return answer.failed(asked, ranks, "they are released, and some ranks have memory of them")

    # Some ranks may have given memory back, so all of them take it again. Where that is not to be
    # had, the tags are released: of a rank that has them mapped, the next resume is easy.
    undone = moves.resume(group, tags)
    updater.offload_tags.update(tags)  # also where the handler failed before it did so
    if first_failure(undone):
        then = (
            "what other ranks gave back could not be had again, so that they are released: resume "
            f"them; {_troubles(undone)}"
        )
        return answer.failed(tags, ranks, then, held=answer.held | set(tags))
    _restore(updater, request, tags)
    lost = _lost(undone)
    return answer.failed(tags, ranks, _what_is_left(lost), lost=lost)


def _prepare_release(
    original: Callable[..., Any], updater: Any, request: Any, tags: Sequence[str]
) -> None:
    """SGLang's part, and no copy of anything on the device after it."""
    handlers.run(original, updater, request, tags)
    if WEIGHTS in tags:
        handlers.move_stash_to_host(updater)


def _release_by_another(
    original: Callable[..., Any],
    updater: Any,
    request: Any,
    tags: Sequence[str],
    answer: _Answering,
) -> Any:
    """With another saver: the checks only."""
    if not tags:
        return answer.done([], [])
    ranks = Group(updater.tp_cpu_group).attempt(lambda: handlers.check_idle(updater))
    if first_failure(ranks):
        return answer.failed(tags, ranks)
    original(updater, handlers.request_for(request, tags))
    return answer.done(tags, ranks)


def _resume(
    original: Callable[..., Any],
    updater: Any,
    request: Any,
    asked: Sequence[str],
    answer: _Answering,
) -> Any:
    group = Group(updater.tp_cpu_group)
    tags = [tag for tag in asked if tag in updater.offload_tags]
    if not tags:
        return answer.done([], [])
    if not moves.are_memsavers(RESUME_ORDER):
        original(updater, handlers.request_for(request, tags))
        return answer.done(tags, group.attempt(lambda: None))

    stash = handlers.stash_of(updater)
    ranks = moves.resume(group, tags)
    failed = ranks
    if not first_failure(ranks):
        failed = group.attempt(lambda: handlers.run(original, updater, request, tags))
    if not first_failure(failed):
        return answer.done(tags, ranks, held=answer.held - set(tags))
    again = moves.pause(group, tags)
    updater.offload_tags.update(tags)
    if WEIGHTS in tags:
        handlers.keep_stash(updater, stash)
    if first_failure(again):
        # A rank that cannot give it back again stays mapped, which the next call accepts.
        then = (
            "they count as released, and ranks that had taken memory could not give it back: "
            f"{_troubles(again)}; release or resume them again"
        )
        return answer.failed(tags, failed, then, held=answer.held | set(tags))
    then = "on every rank they are released as before; make room and resume them again"
    return answer.failed(tags, failed, then, held=answer.held - set(tags))


def add_state(result: Any, scheduler: Any, *_: Any) -> Any:
    """After `Scheduler.get_internal_state`: the state of the memory, under "memsaver".

    It is left out where this SGLang is not as expected: whoever asks then sees no guard.
    """
    try:
        updater = updater_of(scheduler)
        if handlers.is_as_expected(updater):
            state = SchedulerState(
                _name(scheduler),
                tuple(sorted(updater.offload_tags)),
                handlers.is_idle(updater),
                getattr(scheduler, _LAST, None),
            )
            result.internal_state["memsaver"] = state.fields()
    except Exception as error:
        _log_once(f"{type(error).__name__}: {error}")
    return result


@functools.cache
def _log_once(why: str) -> None:
    _logger.error("memsaver cannot tell the state of this SGLang's memory: %s", why)


def _restore(updater: Any, request: Any, tags: Sequence[str]) -> None:
    """SGLang's part of a resume, after a release that failed. Every rank gets here, or none.

    Tag by tag: where the release failed before it had done its part for one, that one has less to
    undo, and the others have it all the same.
    """
    again = resume_of(updater)
    stashed = handlers.stash_of(updater) is not None
    for tag in [tag for tag in RESUME_ORDER if tag in tags]:
        if tag == WEIGHTS and not stashed:
            Group(updater.tp_cpu_group).barrier()  # where the ranks that have stashed them meet
            continue
        try:
            handlers.run(again, updater, request, [tag])
        except Exception as error:
            _logger.warning("SGLang's part of a release of %s could not be undone: %s", tag, error)
    if WEIGHTS in tags:
        handlers.keep_stash(updater, None)
    updater.offload_tags.difference_update(tags)


# --- what goes back -------------------------------------------------------------------------------


class _Answering:
    """Makes the answer to one request, and keeps it for `add_state`.

    Attributes:
        held: what the last answer said of it.
    """

    def __init__(self, updater: Any, operation: str) -> None:
        self._updater = updater
        self._operation = operation
        self._before: Answer | None = getattr(updater.scheduler, _LAST, None)
        self.held: frozenset[str] = frozenset(self._before.held if self._before else ())

    def refused(self, error: ConfigError) -> Any:
        return self._made([], [], Failure.of(error))

    def done(
        self,
        tags: Sequence[str],
        ranks: Sequence[RankReport],
        held: Collection[str] | None = None,
    ) -> Any:
        return self._made(tags, ranks, None, held)

    def failed(
        self,
        tags: Sequence[str],
        ranks: list[RankReport],
        then: str = "nothing has changed",
        held: Collection[str] | None = None,
        lost: Collection[str] = (),
    ) -> Any:
        """The failure of the first rank that has one; `then` is how things are now."""
        rank = first_failure(ranks)
        failure = rank.failure if rank is not None else None
        if rank is not None and failure is not None and failure.kind != EngineBusyError.__name__:
            message = (
                f"{self._operation} of {', '.join(tags)} failed on rank {rank.rank} of "
                f"{len(ranks)} ({rank.host}): {failure.message}; {then}"
            )
            failure = replace(failure, message=message)
        return self._made(tags, ranks, failure, held, lost)

    def _made(
        self,
        tags: Sequence[str],
        ranks: Sequence[RankReport],
        failure: Failure | None,
        held: Collection[str] | None = None,
        lost: Collection[str] = (),
    ) -> Any:
        answer = Answer(
            _name(self._updater.scheduler),
            self._operation,
            tuple(tags),
            tuple(sorted(self._updater.offload_tags)),
            tuple(sorted(self.held if held is None else held)),
            tuple(ranks),
            failure,
            self._before.number + 1 if self._before is not None else 1,
            tuple(sorted(lost)),
        )
        setattr(self._updater.scheduler, _LAST, answer)
        return handlers.output_of(self._operation, answer.text())


def _name(scheduler: Any) -> str:
    """The name of a scheduler, which no other has: containers may share host names and pids."""
    if not hasattr(scheduler, _NAME):
        name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(8)}"
        setattr(scheduler, _NAME, name)
    return str(getattr(scheduler, _NAME))


def _is_moved(tag: str, ranks: Sequence[RankReport]) -> bool:
    return any(rank.device_bytes.get(tag, 0) for rank in ranks)


def _troubles(ranks: Sequence[RankReport]) -> str:
    return "; ".join(
        f"rank {rank.rank} ({rank.host}): {rank.failure.message}"
        for rank in ranks
        if rank.failure is not None
    )


def _lost(undone: Sequence[RankReport]) -> set[str]:
    """Return the tags whose contents a failed release lost.

    These are the tags for which its rollback mapped more bytes than it copied back.
    """
    return {
        tag
        for rank in undone
        for tag, taken in rank.device_bytes.items()
        if taken > rank.copied_bytes.get(tag, 0)
    }


def _what_is_left(lost: Collection[str]) -> str:
    if not lost:
        return "every rank has its memory, with its contents"
    return (
        f"every rank has its memory; contents of {', '.join(sorted(lost))} without a backup are "
        "lost on some ranks"
    )
