"""Undo a release or a resume on the schedulers where it succeeded, if it failed on another one.

The schedulers of data-parallel replicas do not exchange failures: each releases or resumes its tags
on all of its ranks or on none. Whoever receives the answers of all schedulers undoes the operation
with the opposite request. An undone release restores contents that have a backup.
"""

from __future__ import annotations

from collections.abc import Sequence

from .messages import Answer, error_of
from .ranks import lost_tags
from .tags import RELEASE_ORDER, WEIGHTS

__all__ = ["changed_tags", "description"]


def changed_tags(answers: Sequence[Answer]) -> list[str]:
    """Return the tags that an operation changed on schedulers where it succeeded."""
    changed = {tag for one in answers if one.failure is None for tag in one.tags}
    return [tag for tag in RELEASE_ORDER if tag in changed]


def description(operation: str, undone: Sequence[Answer]) -> str:
    """Return the end of the error's message, which describes the schedulers that undid the call.

    Args:
        operation: the operation that failed, either "release" or "resume".
        undone: the answers to the opposite request.
    """
    failed = error_of(undone)
    if failed is not None:
        return f"; other replicas could not undo their {operation}: {failed}"
    text = f"; other replicas have undone their {operation}"
    if operation == "release" and WEIGHTS in lost_tags(r for one in undone for r in one.ranks):
        text += ", but their weights had no backup and are lost: update them"
    return text
