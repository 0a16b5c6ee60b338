"""Calls from memsaver's hooks to SGLang's own handlers for release and resume.

The handlers receive a saver that does nothing, so they only handle caches, model buffers, queues
and bookkeeping. memsaver releases or maps the memory before or after the handlers run, on all ranks
together.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from memsaver.errors import ConfigError, InvalidStateError

from ..engine.errors import EngineBusyError
from ..engine.host_copies import to_host
from ..engine.ranks import Group
from ..engine.tags import WEIGHTS, check_known
from .draft_weights import DRAFTER
from .failed_replies import fields_of
from .places import effective_arguments, ranks_in
from .protocol import STRICT
from .updaters import scheduler_of

__all__ = [
    "check_idle",
    "check_states",
    "is_as_expected",
    "is_idle",
    "is_running",
    "keep_stash",
    "move_stash_to_host",
    "output_of",
    "reports_states",
    "request_for",
    "requested_tags",
    "run",
    "stash_of",
]

# Attributes of the weight updater, which has the handlers. A stash exists only while the
# weights are released.
_FIELDS = (
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
    """Return whether the handlers have the expected interface. Logs each missing part once."""
    missing = [
        f"{type(updater).__name__} has no {name}"
        for name in (*_FIELDS, _GROUP)
        # The group of a single rank may be None.
        if not hasattr(updater, name) or (name != _GROUP and getattr(updater, name) is None)
    ]
    if scheduler_of(updater) is None:
        missing.append(f"{type(updater).__name__} has no scheduler")
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
        "memsaver cannot protect release and resume in this version of SGLang: %s. SGLang's own "
        "handlers use memsaver as their saver, but an error inside them crashes the engine",
        what,
    )


def output_of(operation: str, text: str, trouble: str = "") -> Any:
    """Return SGLang's reply to a release or a resume, with `text` as its `rid`.

    Args:
        operation: either "release" or "resume".
        text: the answer from memsaver.
        trouble: the reason for a failure, or ""; used by versions whose replies report it.
    """
    result = {"success": not trouble, "message": trouble} if reports_states() else {}
    return _reply(operation)(rid=text, **result)


def reports_states() -> bool:
    """Return whether SGLang reports redundant releases and redundant resumes as errors.

    SGLang's pull request 24123 adds `success` and `message` to the replies for this purpose, and
    raises a `RuntimeError` with the message in the main process. SGLang 0.5.23 does not contain
    this change.
    """
    return "success" in fields_of(_reply("release"))


def _reply(operation: str) -> Any:
    messages = importlib.import_module("sglang.srt.managers.io_struct")
    return getattr(messages, _OUTPUTS[operation])


def check_states(
    request: Any, operation: str, tags: Sequence[str], released: Collection[str]
) -> None:
    """Check that no tag of a strict request is already in the requested state.

    A request for all tags may include such tags, unless every tag is already in the requested
    state.

    Raises:
        InvalidStateError: a tag to release is already released, or a tag to resume is not released.
    """
    if getattr(request, "rid", None) != STRICT:
        return
    wrong = [tag for tag in tags if (tag in released) == (operation == "release")]
    if not wrong or (not request.tags and len(wrong) < len(tags)):
        return
    state = "already released" if operation == "release" else "not currently released"
    verb = "is" if len(wrong) == 1 else "are"
    raise InvalidStateError(
        f"{', '.join(wrong)} {verb} {state}: nothing was done; omit such tags, or call "
        "memsaver's SleepController, which skips them"
    )


def requested_tags(request: Any, order: Sequence[str]) -> list[str]:
    """Return the tags of a request, in the order in which SGLang processes them.

    Raises:
        ConfigError: SGLang does not know one of the tags, or the request's tags are not a list.
    """
    tags = request.tags or order  # SGLang treats None and an empty list as all tags
    if isinstance(tags, str) or not isinstance(tags, Iterable):
        raise ConfigError(f"tags must be a list of names, not {type(tags).__name__}")
    tags = [tag for tag in tags if tag != DRAFTER]
    check_known(tags, order)
    return [tag for tag in order if tag in tags]


def request_for(request: Any, tags: Sequence[str]) -> Any:
    """Return a copy of the request with these tags."""
    request = copy.copy(request)
    request.tags = list(tags)
    return request


def is_idle(updater: Any) -> bool:
    """Return whether the engine is idle, using the check of this version's own handler.

    While generation is paused, waiting requests are ignored, except with pipeline parallelism,
    because the pipeline's loop runs them even then.
    """
    scheduler = scheduler_of(updater)
    is_pipeline = ranks_in(effective_arguments(scheduler), "pp_size") > 1
    paused = getattr(scheduler, "_engine_paused", False) and not is_pipeline
    if "ignore_waiting" in inspect.signature(updater.is_fully_idle).parameters:
        return bool(updater.is_fully_idle(ignore_waiting=paused))
    return bool(updater.is_fully_idle())


def check_idle(updater: Any) -> None:
    """Raise `EngineBusyError` if requests are in flight."""
    if not is_idle(updater):
        raise EngineBusyError(
            "the engine has requests in flight: memory can be released after they end; "
            "wait for them, or abort them"
        )


def stash_of(updater: Any) -> Any:
    """Return the model's buffers that a release stores for the resume; None if there are none."""
    return getattr(updater, _STASH, None)


def keep_stash(updater: Any, stash: Any) -> None:
    """Store buffers for the next resume."""
    setattr(updater, _STASH, stash)


def move_stash_to_host(updater: Any) -> None:
    """Move the stash, which contains copies of the model's buffers, from the device to host memory.

    SGLang's resume handler copies the stash from host memory. Releases the stash's device memory to
    the driver, together with all other memory in torch's cache.
    """
    stash = stash_of(updater)
    buffers = stash.get("buffers", []) if isinstance(stash, dict) else []
    if not any(tensor.is_cuda for _, tensor in buffers):
        return
    import torch

    stash["buffers"] = [(name, to_host(tensor)) for name, tensor in buffers]
    del buffers
    torch.cuda.empty_cache()


def run(original: Callable[..., Any], updater: Any, request: Any, tags: Sequence[str]) -> None:
    """Run SGLang's part of a release or a resume, while all memory is mapped.

    The call is collective if the weights are among the tags, because the handlers wait at a
    barrier. A rank joins this barrier even if its handler raises before reaching it. The handler's
    exceptions propagate.
    """
    saver = _NoSaver()
    adapter, updater.memory_saver_adapter = updater.memory_saver_adapter, saver
    try:
        original(updater, request_for(request, tags))
    except Exception:
        # A release waits at the barrier immediately before it pauses, a resume immediately after it
        # resumes.
        if WEIGHTS in tags and WEIGHTS not in saver.received:
            Group(updater.tp_cpu_group).barrier()
        raise
    finally:
        updater.memory_saver_adapter = adapter


def is_running(updater: Any) -> bool:
    """Return whether `run` is in progress, which means that memsaver is calling the handlers."""
    return isinstance(getattr(updater, "memory_saver_adapter", None), _NoSaver)


class _NoSaver:
    """A saver for SGLang's handlers that does nothing.

    Attributes:
        received: the tags that were passed to `pause` and `resume`.
    """

    enabled = True

    def __init__(self) -> None:
        self.received: list[str] = []

    def check_validity(self, caller_name: str = "") -> None:
        pass

    def pause(self, tag: str) -> None:
        self.received.append(tag)

    def resume(self, tag: str) -> None:
        self.received.append(tag)
