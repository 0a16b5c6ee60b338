"""Release and resume in SGLang's tokenizer manager, with the schedulers' answers or errors."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from ..engine.messages import Answer
from . import handlers
from .admissions import change
from .protocol import FORGIVING, IDLE, REWRITTEN, STRICT

__all__ = ["request_release", "request_resume"]


def request_release(manager: Any, obj: Any, request: Any = None) -> Awaitable[Sequence[Answer]]:
    """Replace `TokenizerControlMixin.release_memory_occupation`; return the answers or raise."""
    _mark(obj)
    return change(manager, "release", manager.release_memory_occupation_communicator, obj)


def request_resume(manager: Any, obj: Any, request: Any = None) -> Awaitable[Sequence[Answer]]:
    """Replace `TokenizerControlMixin.resume_memory_occupation`; return the answers, or raise."""
    _mark(obj)
    return change(manager, "resume", manager.resume_memory_occupation_communicator, obj)


def _mark(obj: Any) -> None:
    """Mark a request as STRICT if SGLang reports states, unless memsaver's controller sends it.

    A client's request must not be marked as IDLE, because a scheduler would not reply to it.
    """
    if obj.rid == IDLE:
        obj.rid = None
    if handlers.reports_states() and obj.rid not in (FORGIVING, REWRITTEN):
        obj.rid = STRICT
