"""Sends memsaver's messages between SGLang's processes inside SGLang's own messages.

SGLang's requests and replies have no field for memsaver's messages. The string `rid`, which SGLang
ignores in update requests and in replies to releases and resumes, carries a message as JSON after a
prefix. The result of an update is in the reply's `message` field. A scheduler's state is part of
the server information, under the key "memsaver".

The `rid` of a request to release or resume has one of these values on its way to the schedulers:

- FORGIVING: memsaver's controller sends the request.
- REWRITTEN: memsaver's controller sends the request, and the weights are about to be overwritten.
- IDLE: an idle scheduler itself creates the request, on each of its ranks, and expects no reply.
- UNDO: the tokenizer manager sends the request to undo a release or a resume that failed on another
  replica; see `undoing`. UNDO_REWRITTEN undoes a resume that was REWRITTEN.
- STRICT: another client sends the request, and this version of SGLang reports an error for tags
  that are already in the requested state. In older versions, another client's `rid` is unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from ..engine.errors import EngineError
from ..engine.fields import Fields, parsed
from ..engine.messages import Answer, SchedulerState
from ..engine.weights.checks import RankCheck, VerificationRequest

__all__ = [
    "FORGIVING",
    "IDLE",
    "INCOMPLETE",
    "REWRITTEN",
    "STRICT",
    "TOUCH",
    "UNDO",
    "UNDO_REWRITTEN",
    "answers_of",
    "checks_in",
    "is_health_check",
    "states_of",
    "text_of",
    "text_of_checks",
    "verification_of",
]

_PREFIX = "memsaver:"
FORGIVING, STRICT = f"{_PREFIX}forgiving", f"{_PREFIX}strict"
REWRITTEN, IDLE = f"{_PREFIX}rewritten", f"{_PREFIX}idle"
UNDO, UNDO_REWRITTEN = f"{_PREFIX}undo", f"{_PREFIX}undo-rewritten"
TOUCH = f"{_PREFIX}touch"  # of a query of the state that restarts an engine's idle timer
INCOMPLETE = f"{_PREFIX}incomplete"  # of the end of an update that has not loaded all weights
_HEALTH = "HEALTH_CHECK"  # the beginning of a health check's rid


def is_health_check(request: Any) -> bool:
    """Return whether a request is a health check that SGLang's own server sends."""
    rid = getattr(request, "rid", None)
    return isinstance(rid, str) and rid.startswith(_HEALTH)


def text_of(message: Answer | VerificationRequest) -> str:
    """Return a message as text for `answers_of` or `verification_of`."""
    return _PREFIX + json.dumps(asdict(message))


def text_of_checks(checks: Iterable[RankCheck]) -> str:
    """Return the checks of a scheduler's ranks as text for `checks_in`."""
    return _PREFIX + json.dumps([asdict(check) for check in checks])


def states_of(internal_states: object) -> list[SchedulerState]:
    """Read the schedulers' states from SGLang's `internal_states`.

    Returns:
        The schedulers' states; [] if a scheduler lacks memsaver's hooks.

    Raises:
        EngineError: `internal_states` is not a list of objects, or a state is invalid.
    """
    if not isinstance(internal_states, list | tuple):
        raise EngineError(
            f"an engine's internal states must be a list, not {type(internal_states).__name__}"
        )
    states = [Fields(state, "an internal state").optional("memsaver") for state in internal_states]
    if any(state is None for state in states):
        return []
    return [SchedulerState.from_fields(state) for state in states]


def answers_of(outputs: Iterable[object]) -> list[Answer]:
    """Return the answers in SGLang's outputs; only schedulers with memsaver's hooks send answers.

    Raises:
        EngineError: an answer is invalid.
    """
    texts = [getattr(output, "rid", None) for output in outputs]
    return [
        Answer.from_fields(parsed(text[len(_PREFIX) :], "a scheduler's answer"))
        for text in texts
        if isinstance(text, str) and text.startswith(_PREFIX)
    ]


def verification_of(rid: object) -> VerificationRequest | None:
    """Return the verification request in a request's `rid`, or None.

    Raises:
        EngineError: the text begins like a verification request, but is invalid.
    """
    if not isinstance(rid, str) or not rid.startswith(_PREFIX):
        return None
    return VerificationRequest.from_fields(parsed(rid[len(_PREFIX) :], "a verification request"))


def checks_in(message: str) -> list[RankCheck]:
    """Return the ranks' checks in SGLang's message about an update; [] if there are none.

    SGLang concatenates the messages of several schedulers and adds its own text.

    Raises:
        EngineError: a part of the message begins like checks, but is invalid.
    """
    return [RankCheck.from_fields(row) for rows in _lists_in(message) for row in rows]


def _lists_in(message: str) -> Iterator[list[Any]]:
    decoder = json.JSONDecoder()
    at = message.find(_PREFIX)
    while at >= 0:
        try:
            rows, end = decoder.raw_decode(message, at + len(_PREFIX))
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"the engine's answer was truncated: {message[at:][:200]!r}"
            ) from error
        if not isinstance(rows, list):
            raise EngineError(
                f"the checks of an engine's ranks must be a list, not {type(rows).__name__}"
            )
        yield rows
        at = message.find(_PREFIX, end)
