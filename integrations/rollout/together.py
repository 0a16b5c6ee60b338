"""INTERFACE ONLY SO FAR: something done by a group's leader, with its result or error on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Together:
    def on_leader(
        self, what: str, action: Callable[[], Result], timeout: float | None = None
    ) -> Result:
        """`action()` on the leader, its (picklable) result on every rank; the same error on all."""

    def gather(self, what: str, work: Callable[[], Result]) -> list[Result]:
        """`work()` on every rank; the (picklable) results of all, in the group's order, on all.

        Where it raises on a rank, the same error is raised on all.
        """

    def everyone(self, what: str, error: BaseException | None) -> None:
        """A meeting: returns where no rank brings an error, else raises the same one on all."""
