"""Where an update's ranks meet: those of one engine, and those of all engines beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from memsaver.errors import ConfigError
from memsaver.integrations.rollout.together import Together

if TYPE_CHECKING:
    from memsaver.integrations.rollout.engine import RolloutEngine

__all__ = ["Meetings"]

Result = TypeVar("Result")


class Meetings:
    """The ranks of an update. Each step is a collective of all of them, and fails on all or none.

    A trainer's shards are gathered over the ranks of several engines at once, so that one that left
    would keep the others waiting.

    Args:
        engine: the engine.
        timeout: seconds to wait for ranks of other engines.
    """

    def __init__(self, engine: RolloutEngine, timeout: float) -> None:
        self._own = engine.together
        layout = engine.layout
        groups = layout.dp_groups if layout.dp_size > 1 else ()
        self._others = [Together(group, timeout, "weights") for group in groups]

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[Together]:
        """For the block, this engine's ranks do something; then those of all engines meet.

        Args:
            what: the step in words, the same on all ranks.

        Raises:
            RankError, GroupError, MemsaverError: as of `Together`, on all ranks.
        """
        failed: BaseException | None = None
        try:
            yield self._own
        except BaseException as error:
            failed = error
        for others in self._others:
            try:
                others.meet(what, failed)
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def agree(self, what: str, value: str) -> None:
        """Raise ConfigError, on all ranks, where the ranks of other engines have other values."""
        failed: ConfigError | None = None
        for others in self._others:
            if len(set(others.gather(what, lambda: value))) > 1:
                failed = failed or ConfigError(
                    f"{what}: the ranks of different engines do not send the same tensors"
                )
        if self._others:
            with self.step(what) as own:
                own.meet(what, failed)

    def together(self, what: str, work: Callable[[], Result]) -> list[Result]:
        """`Together.gather`, as a step."""
        with self.step(what) as own:
            found: list[Result] = own.gather(what, work)
        return found
