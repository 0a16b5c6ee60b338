"""Release and resume in SGLang's tokenizer manager, with the schedulers' answers or errors."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ..engine.messages import Answer, error_of
from .protocol import answers_of

__all__ = ["request_release", "request_resume"]


def request_release(manager: Any, obj: Any, request: Any = None) -> Awaitable[list[Answer]]:
    """Replace `TokenizerControlMixin.release_memory_occupation`; return the answers, or raise."""
    return _submit(manager, manager.release_memory_occupation_communicator, obj)


def request_resume(manager: Any, obj: Any, request: Any = None) -> Awaitable[list[Answer]]:
    """Replace `TokenizerControlMixin.resume_memory_occupation`; return the answers, or raise."""
    return _submit(manager, manager.resume_memory_occupation_communicator, obj)


async def _submit(manager: Any, communicator: Any, obj: Any) -> list[Answer]:
    manager.auto_create_handle_loop()
    answers = answers_of(await communicator(obj))
    error = error_of(answers)
    if error is not None:
        raise error
    return answers
