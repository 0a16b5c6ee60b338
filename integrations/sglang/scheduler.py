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
| a release fails | mapped; contents without a backup may be gone, the KV cache is flushed |
| a resume fails | released as before, backups untouched; the same call may be made again |

The result travels in the answer to the tokenizer manager, whose methods return the answers of all
schedulers, or raise. It is part of the server information, too. Pipeline stages decide each for
itself. An engine whose saver is not memsaver's gets the checks only.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from types import ModuleType
from typing import Any

import memsaver
from memsaver.errors import ConfigError, NotLoadedError
from memsaver.integrations.sglang.errors import EngineBusyError
from memsaver.integrations.sglang.protocol import (
    RELEASE_ORDER,
    RESUME_ORDER,
    WEIGHTS,
    Answer,
    Failure,
    RankReport,
    SchedulerState,
    answers_of,
    error_of,
)
from memsaver.integrations.sglang.ranks import Figures, Group, first_failure
from memsaver.integrations.sglang.tags import names_of
from memsaver.reports import Report

__all__ = ["install", "install_in", "modules"]

_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_LAST = "_memsaver_last_answer"  # of a scheduler
_INSTALLED = "_memsaver_hooks"  # of a class


def install() -> None:
    """Put the hooks in place at once, importing the modules that they are on. Idempotent.

    To be called before the scheduler is made, when SGLang's modules can be imported.
    """
    for name in modules():
        install_in(importlib.import_module(name))


def modules() -> tuple[str, ...]:
    """The modules of SGLang's that have something to hook, for `install_in`."""
    return tuple(dict.fromkeys(target.rsplit(".", 2)[0] for target in _hooks()))


def install_in(module: ModuleType) -> None:
    """Put the hooks on one of `modules()` in place, which has been imported. Idempotent.

    Not by SGLang's registry: some processes do not ask it, and it imports whatever has a hook, the
    whole scheduler in a process that only detokenizes, say.
    """
    for target, (kind, hook) in _hooks().items():
        where, owner_name, name = target.rsplit(".", 2)
        if where != module.__name__:
            continue
        owner = getattr(module, owner_name)
        done = vars(owner).get(_INSTALLED, frozenset())
        if name not in done:
            setattr(owner, name, _wrapped(kind, getattr(owner, name), hook))
            setattr(owner, _INSTALLED, done | {name})


def _hooks() -> dict[str, tuple[str, Callable[..., Any]]]:
    """By method: which kind of hook, in the words of SGLang's registry, and the hook.

    AROUND is called with the original and its arguments, AFTER with its result and its arguments,
    REPLACE with its arguments.
    """
    return {
        f"{_UPDATER}.release_memory_occupation": ("AROUND", release),
        f"{_UPDATER}.resume_memory_occupation": ("AROUND", resume),
        f"{_SCHEDULER}.get_internal_state": ("AFTER", add_state),
        f"{_TOKENIZER}.release_memory_occupation": ("REPLACE", ask_to_release),
        f"{_TOKENIZER}.resume_memory_occupation": ("REPLACE", ask_to_resume),
    }


def _wrapped(kind: str, original: Callable[..., Any], hook: Callable[..., Any]) -> Any:
    """The method with its hook."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kind == "AROUND":
            return hook(original, *args, **kwargs)
        if kind == "AFTER":
            return hook(original(*args, **kwargs), *args, **kwargs)
        return hook(*args, **kwargs)

    return call


# --- in the schedulers ----------------------------------------------------------------------------


def release(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.release_memory_occupation`."""
    if isinstance(updater.memory_saver_adapter, _Deferred):
        return original(updater, request)  # from here already
    group = Group(updater.tp_cpu_group)
    try:
        tags = [tag for tag in _asked(request, RELEASE_ORDER) if tag not in updater.offload_tags]
    except ConfigError as error:
        return _answer(updater, "release", [], [], Failure.of(error))
    if not tags:
        return _answer(updater, "release", [], [])
    ranks = group.attempt(lambda: _check_idle(updater))
    if first_failure(ranks):
        return _answer(updater, "release", tags, ranks)
    if not _names(RELEASE_ORDER):
        original(updater, _only(request, tags))
        return _answer(updater, "release", tags, ranks)

    ranks = group.attempt(lambda: _prepare(original, updater, request, tags))
    if not first_failure(ranks):
        ranks = group.attempt(lambda: _move(memsaver.pause, tags))
    if first_failure(ranks):
        # Some ranks may have given memory back, so all of them take it again. Where that is not to
        # be had, the tags are released: of a rank that has them mapped, the next resume is easy.
        undone = group.attempt(lambda: _move(memsaver.resume, tags))
        if not first_failure(undone):
            _restore(updater, request, tags)
    return _answer(updater, "release", tags, ranks)


def resume(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.resume_memory_occupation`."""
    if isinstance(updater.memory_saver_adapter, _Deferred):
        return original(updater, request)
    group = Group(updater.tp_cpu_group)
    try:
        tags = [tag for tag in _asked(request, RESUME_ORDER) if tag in updater.offload_tags]
    except ConfigError as error:
        return _answer(updater, "resume", [], [], Failure.of(error))
    if not tags:
        return _answer(updater, "resume", [], [])
    if not _names(RESUME_ORDER):
        original(updater, _only(request, tags))
        return _answer(updater, "resume", tags, group.attempt(lambda: None))

    ranks = group.attempt(lambda: _move(memsaver.resume, tags))
    if first_failure(ranks):
        # A rank that cannot give it back again stays mapped, which the next resume accepts.
        group.attempt(lambda: _move(memsaver.pause, tags))
    else:
        with _Deferral(updater):
            original(updater, _only(request, tags))
    return _answer(updater, "resume", tags, ranks)


def add_state(result: Any, scheduler: Any, *_: Any) -> Any:
    """After `Scheduler.get_internal_state`: the state of the memory, under "memsaver"."""
    updater = scheduler.weight_updater
    state = SchedulerState(
        tuple(sorted(updater.offload_tags)), _is_idle(updater), getattr(scheduler, _LAST, None)
    )
    result.internal_state["memsaver"] = state.fields()
    return result


def _asked(request: Any, order: Sequence[str]) -> list[str]:
    """The tags of a request, in the order in which SGLang works on them."""
    tags = request.tags or order  # none at all, or an empty list, are all of them to SGLang
    unknown = [tag for tag in tags if tag not in order]
    if unknown:
        raise ConfigError(f"SGLang has no memory called {unknown[0]!r}; it has {', '.join(order)}")
    return [tag for tag in order if tag in tags]


def _only(request: Any, tags: Sequence[str]) -> Any:
    """The request, for these tags."""
    request = copy.copy(request)
    request.tags = list(tags)
    return request


def _names(tags: Sequence[str]) -> dict[str, str]:
    """SGLang's tag of each of memsaver's tags behind these; {} where another saver has them."""
    try:
        return {name: tag for tag in tags for name in names_of(tag)}
    except NotLoadedError:
        return {}


def _move(transition: Callable[..., Report], tags: Sequence[str]) -> Figures | None:
    """Pause or resume the tags, in one call; to it, no tags would mean all of them."""
    names = _names(tags)
    if not names:
        return None
    report = transition(*names)
    device, copied = dict.fromkeys(tags, 0), dict.fromkeys(tags, 0)
    for change in report.changes:
        device[names[change.tag]] += change.device_bytes
        copied[names[change.tag]] += change.copied_bytes
    return Figures(report.seconds, device, copied)


def _is_idle(updater: Any) -> bool:
    """As the handler of this version of SGLang asks it."""
    paused = getattr(updater.scheduler, "_engine_paused", False)
    if "ignore_waiting" in inspect.signature(updater.is_fully_idle).parameters:
        return bool(updater.is_fully_idle(ignore_waiting=paused))
    return bool(updater.is_fully_idle())


def _check_idle(updater: Any) -> None:
    if not _is_idle(updater):
        raise EngineBusyError(
            "the engine has requests in flight: memory can be released when they are done; "
            "wait for them, or abort them"
        )


def _prepare(original: Callable[..., Any], updater: Any, request: Any, tags: Sequence[str]) -> None:
    """SGLang's part of a release, while everything is mapped."""
    with _Deferral(updater) as saver:
        try:
            original(updater, _only(request, tags))
        except Exception:
            if WEIGHTS in tags and WEIGHTS not in saver.paused:
                Group(updater.tp_cpu_group).barrier()  # where the other ranks wait for this one
            raise


def _restore(updater: Any, request: Any, tags: Sequence[str]) -> None:
    """SGLang's part of a resume, after a release that failed. Every rank gets here, or none."""
    try:
        with _Deferral(updater):
            updater.resume_memory_occupation(_only(request, tags))
    except Exception:
        # Where the release failed before it had done its part, there is less to undo.
        updater.stashed_model_static_state = None
    updater.offload_tags.difference_update(tags)


def _answer(
    updater: Any,
    operation: str,
    tags: Sequence[str],
    ranks: list[RankReport],
    failure: Failure | None = None,
) -> Any:
    """What goes back to the tokenizer manager, as SGLang's type for it."""
    failed = first_failure(ranks)
    if failed is not None and failed.failure is not None:
        failure = _failure(updater, operation, tags, ranks, failed, failed.failure)
    before = getattr(updater.scheduler, _LAST, None)
    answer = Answer(
        operation,
        tuple(tags),
        tuple(sorted(updater.offload_tags)),
        tuple(ranks),
        failure,
        before.number + 1 if before is not None else 1,
    )
    setattr(updater.scheduler, _LAST, answer)
    from sglang.srt.managers import io_struct

    output = {
        "release": io_struct.ReleaseMemoryOccupationReqOutput,
        "resume": io_struct.ResumeMemoryOccupationReqOutput,
    }[operation]
    return output(rid=answer.text())


def _failure(
    updater: Any,
    operation: str,
    tags: Sequence[str],
    ranks: list[RankReport],
    failed: RankReport,
    why: Failure,
) -> Failure:
    if why.kind == EngineBusyError.__name__:
        return why
    if operation == "resume":
        then = "on every rank they are released as before; make room and resume them again"
    elif any(tag in updater.offload_tags for tag in tags):
        then = "what the other ranks gave back could not be had again: they are released; resume"
    else:
        then = "every rank has its memory; contents without a backup may be lost"
    message = (
        f"{operation} of {', '.join(tags)} failed on rank {failed.rank} of {len(ranks)} "
        f"({failed.host}): {why.message}; {then}"
    )
    return Failure(why.kind, message, why.tag, why.needed, why.free)


class _Deferred:
    """A saver for SGLang's handlers that does nothing: the hooks do its work."""

    enabled = True

    def __init__(self) -> None:
        self.paused: list[str] = []

    def check_validity(self, caller_name: str = "") -> None:
        pass

    def pause(self, tag: str) -> None:
        self.paused.append(tag)

    def resume(self, tag: str) -> None:
        pass


class _Deferral:
    """For a block, the updater has a saver that does nothing."""

    def __init__(self, updater: Any) -> None:
        self._updater, self._saver = updater, updater.memory_saver_adapter

    def __enter__(self) -> _Deferred:
        saver = self._updater.memory_saver_adapter = _Deferred()
        return saver

    def __exit__(self, *_: object) -> None:
        self._updater.memory_saver_adapter = self._saver


# --- in the tokenizer manager ---------------------------------------------------------------------


def ask_to_release(manager: Any, obj: Any, request: Any = None) -> Awaitable[list[Answer]]:
    """Instead of `TokenizerControlMixin.release_memory_occupation`: the answers, or an error."""
    return _ask(manager, manager.release_memory_occupation_communicator, obj)


def ask_to_resume(manager: Any, obj: Any, request: Any = None) -> Awaitable[list[Answer]]:
    """Instead of `TokenizerControlMixin.resume_memory_occupation`: the answers, or an error."""
    return _ask(manager, manager.resume_memory_occupation_communicator, obj)


async def _ask(manager: Any, communicator: Any, obj: Any) -> list[Answer]:
    manager.auto_create_handle_loop()
    answers: list[Answer] = answers_of(await communicator(obj))
    error = error_of(answers)
    if error is not None:
        raise error
    return answers
