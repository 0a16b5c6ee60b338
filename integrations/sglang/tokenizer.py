"""Release and resume in SGLang's tokenizer manager: the schedulers' answers, or their error."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from memsaver.integrations.sglang.protocol import Answer, answers_of, error_of

__all__ = ["ask_to_release", "ask_to_resume"]


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
