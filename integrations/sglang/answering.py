"""`Answering`: creates a scheduler's answer to one release or resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from memsaver.errors import ConfigError, InvalidStateError

from ..engine.answers import failure_of, last_answer, next_answer
from ..engine.errors import EngineBusyError
from ..engine.messages import Failure, RankReport
from ..engine.ranks import Group, first_failure
from . import guard, handlers, unguarded
from .protocol import text_of
from .updaters import scheduler_of

__all__ = ["Answering", "run_unexpected"]

_logger = logging.getLogger("memsaver.sglang")


class Answering:
    """Creates the answer to one request, and stores the answer for `scheduler.add_state`.

    Args:
        updater: the updater that handles the request.
        operation: either "release" or "resume".
        group: the ranks that handle the request together.
        is_idle: whether memsaver itself made the request because the engine is idle. If so, no
            client waits for a reply, and a failure is logged.

    Attributes:
        group: the ranks that handle the request together.
        held: the tags in the previous answer's `held`; see `Answer`.
    """

    def __init__(self, updater: Any, operation: str, group: Group, is_idle: bool) -> None:
        self._updater = updater
        self._scheduler = scheduler_of(updater)
        self._operation = operation
        self._is_idle = is_idle
        self.group = group
        before = last_answer(self._scheduler)
        self.held: frozenset[str] = frozenset(before.held if before else ())

    def refused(self, error: ConfigError | InvalidStateError) -> Any:
        """Answer a request that was rejected before it had any effect."""
        return self._made([], [], Failure.of(error))

    def repeated(self) -> Any:
        """Repeat the previous answer, for a request that has no effect."""
        before = last_answer(self._scheduler)
        return handlers.output_of(self._operation, "" if before is None else text_of(before))

    def done(
        self,
        tags: Sequence[str],
        ranks: Sequence[RankReport],
        held: Collection[str] | None = None,
        lost: Collection[str] = (),
    ) -> Any:
        """Answer a request that released or resumed the tags; None keeps the previous `held`."""
        return self._made(tags, ranks, None, held, lost)

    def failed(
        self,
        tags: Sequence[str],
        ranks: list[RankReport],
        then: str = "nothing has changed",
        held: Collection[str] | None = None,
        lost: Collection[str] = (),
    ) -> Any:
        """Answer with the first failure of a rank; `then` describes the state after the failure."""
        rank = first_failure(ranks)
        failure = rank.failure if rank is not None else None
        if failure is not None and failure.kind != EngineBusyError.__name__:
            failure = failure_of(ranks, f"{self._operation} of {', '.join(tags)}", then)
        return self._made(tags, ranks, failure, held, lost)

    def _made(
        self,
        tags: Sequence[str],
        ranks: Sequence[RankReport],
        failure: Failure | None,
        held: Collection[str] | None = None,
        lost: Collection[str] = (),
    ) -> Any:
        answer = next_answer(
            self._scheduler,
            self._operation,
            tags,
            self._updater.offload_tags,
            ranks,
            failure,
            held=self.held if held is None else held,
            lost=lost,
        )
        trouble = failure.message if failure is not None else ""
        if self._is_idle:
            if trouble:
                _logger.warning("the idle engine keeps its memory: %s", trouble)
            return None
        # A tokenizer manager, if there is one, logs the failure once for all schedulers.
        if trouble and guard.is_rust_served(self._scheduler):
            _logger.warning("a %s of memory failed: %s", self._operation, trouble)
        return handlers.output_of(self._operation, text_of(answer), trouble)


def run_unexpected(original: Callable[..., Any], updater: Any, request: Any, operation: str) -> Any:
    """Call handlers with an unexpected interface; see `scheduler`.

    Answers a release that `unguarded.check_release` rejects, if the handlers provide what the
    answer needs. Otherwise, logs the rejection; the sender receives no reply.
    """
    try:
        if operation == "release":
            unguarded.check_release(scheduler_of(updater))
    except ConfigError as error:
        try:
            return Answering(updater, operation, Group(None), is_idle=False).refused(error)
        except (AttributeError, ImportError, TypeError) as lacking:
            _logger.error(
                "a release is rejected, and its sender receives no reply: %s (%s)", error, lacking
            )
            return None
    return original(updater, request)
