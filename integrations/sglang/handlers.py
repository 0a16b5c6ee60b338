"""SGLang's own handlers of release and resume: what memsaver needs of them, and how it calls them.

They do their part (caches, model buffers, queues, bookkeeping) with a saver that does nothing,
since the saver's work is done before or after them, on all ranks at once.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from memsaver.errors import ConfigError
from memsaver.integrations.sglang.errors import EngineBusyError
from memsaver.integrations.sglang.protocol import WEIGHTS
from memsaver.integrations.sglang.ranks import Group

__all__ = [
    "asked_tags",
    "check_idle",
    "is_as_expected",
    "is_idle",
    "is_running",
    "keep_stash",
    "move_stash_to_host",
    "output_of",
    "request_for",
    "run",
    "stash_of",
]

# Of the weight updater, which has the handlers. `stashed_model_static_state` comes and goes.
_FIELDS = (
    "scheduler",
    "memory_saver_adapter",
    "offload_tags",
    "is_fully_idle",
    "release_memory_occupation",
    "resume_memory_occupation",
)
_GROUP = "tp_cpu_group"
_STASH = "stashed_model_static_state"
_OUTPUTS = {
    "release": "ReleaseMemoryOccupationReqOutput",
    "resume": "ResumeMemoryOccupationReqOutput",
}
_logger = logging.getLogger("memsaver.sglang")


def is_as_expected(updater: Any) -> bool:
    """Whether the handlers are those of a known SGLang. Logs what they lack, once each."""
    missing = [
        f"{type(updater).__name__} has no {name}"
        for name in (*_FIELDS, _GROUP)
        # The group of a single rank may be None.
        if not hasattr(updater, name) or (name != _GROUP and getattr(updater, name) is None)
    ]
    missing += _missing_of_outputs()
    for what in missing:
        _log(what)
    return not missing


def _missing_of_outputs() -> list[str]:
    for operation in _OUTPUTS:
        try:
            output_of(operation, "")
        except (ImportError, AttributeError, TypeError) as error:
            return [str(error)]
    return []


@functools.cache
def _log(what: str) -> None:
    _logger.error(
        "memsaver cannot guard the release and resume of this SGLang: %s. SGLang's own handlers "
        "work with memsaver as their saver, and do not survive what fails in them",
        what,
    )


def output_of(operation: str, text: str) -> Any:
    """What SGLang answers to a release or a resume, with a text in it."""
    messages = importlib.import_module("sglang.srt.managers.io_struct")
    return getattr(messages, _OUTPUTS[operation])(rid=text)


def asked_tags(request: Any, order: Sequence[str]) -> list[str]:
    """Return the tags of a request, in the order in which SGLang works on them.

    Raises:
        ConfigError: SGLang does not have one of the tags, or the request's tags are not a list.
    """
    tags = request.tags or order  # none at all, or an empty list, are all of them to SGLang
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise ConfigError(f"tags must be a list of names, not {type(tags).__name__}")
    unknown = [tag for tag in tags if tag not in order]
    if unknown:
        raise ConfigError(f"SGLang has no memory called {unknown[0]!r}; it has {', '.join(order)}")
    return [tag for tag in order if tag in tags]


def request_for(request: Any, tags: Sequence[str]) -> Any:
    """The request, for these tags."""
    request = copy.copy(request)
    request.tags = list(tags)
    return request


def is_idle(updater: Any) -> bool:
    """As the handler of this version of SGLang asks it."""
    paused = getattr(updater.scheduler, "_engine_paused", False)
    if "ignore_waiting" in inspect.signature(updater.is_fully_idle).parameters:
        return bool(updater.is_fully_idle(ignore_waiting=paused))
    return bool(updater.is_fully_idle())


def check_idle(updater: Any) -> None:
    """Raise `EngineBusyError` where requests are in flight."""
    if not is_idle(updater):
        raise EngineBusyError(
            "the engine has requests in flight: memory can be released when they are done; "
            "wait for them, or abort them"
        )


def stash_of(updater: Any) -> Any:
    """The model's buffers, which a release keeps for the resume; None where it has none."""
    return getattr(updater, _STASH, None)


def keep_stash(updater: Any, stash: Any) -> None:
    """Have it kept for the next resume."""
    setattr(updater, _STASH, stash)


def move_stash_to_host(updater: Any) -> None:
    """Hold the stash, copies of the model's buffers on the device, in host memory.

    SGLang's handler of a resume takes it from there. The device's memory goes back to the driver,
    with whatever else torch had cached by then.
    """
    stash = stash_of(updater)
    buffers = stash.get("buffers", []) if isinstance(stash, dict) else []
    if not any(tensor.is_cuda for _, tensor in buffers):
        return
    import torch

    stash["buffers"] = [(name, tensor.cpu()) for name, tensor in buffers]
    del buffers
    torch.cuda.empty_cache()


def run(original: Callable[..., Any], updater: Any, request: Any, tags: Sequence[str]) -> None:
    """SGLang's part of a release or a resume, while everything is mapped.

    Collective where the weights are among the tags: the handlers meet at a barrier, to which a rank
    whose handler raises before it comes, too. What the handler raises passes through.
    """
    saver = _NoSaver()
    theirs, updater.memory_saver_adapter = updater.memory_saver_adapter, saver
    try:
        original(updater, request_for(request, tags))
    except Exception:
        # A release stops at the barrier right before it pauses, a resume right after it resumes.
        if WEIGHTS in tags and WEIGHTS not in saver.asked:
            Group(updater.tp_cpu_group).barrier()
        raise
    finally:
        updater.memory_saver_adapter = theirs


def is_running(updater: Any) -> bool:
    """Whether `run` is under way: who calls the handlers now is memsaver."""
    return isinstance(getattr(updater, "memory_saver_adapter", None), _NoSaver)


class _NoSaver:
    """A saver for SGLang's handlers that does nothing.

    Attributes:
        asked: the tags that it was to pause, or to resume.
    """

    enabled = True

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check_validity(self, caller_name: str = "") -> None:
        pass

    def pause(self, tag: str) -> None:
        self.asked.append(tag)

    def resume(self, tag: str) -> None:
        self.asked.append(tag)
