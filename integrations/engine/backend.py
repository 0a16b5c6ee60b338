"""`EngineBackend`: the parts of a `Backend` that all engines share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from memsaver._memory.sharing.wire import domain
from memsaver.errors import ConfigError

from .errors import EngineError
from .fields import is_whole
from .interface import Request, Sample, SharedTensors
from .messages import SchedulerState
from .sleep import EngineController

__all__ = ["EngineBackend", "ranks_in"]


class _Connection(Protocol):
    def states(self, timeout: float) -> list[SchedulerState]: ...

    def death(self) -> str: ...


Link = TypeVar("Link", bound=_Connection)


class EngineBackend(Generic[Link]):
    """See `interface.Backend`. A subclass defines `_samples`.

    Attributes:
        link: the connection to the engine.
        other_ranks: the engine's arguments that add ranks outside its tensor-parallel group, as
            text; "" if there are none.

    Args:
        link: the connection to the engine.
        arguments: the engine's arguments.
        other_ranks: the values of the engine's arguments that can add ranks outside its
            tensor-parallel group.
        end: a function that shuts the engine down, called once; None if the engine's owner shuts it
            down.
    """

    tp_size: int
    control: EngineController
    link: Link

    def __init__(
        self,
        link: Link,
        arguments: Mapping[str, Any],
        other_ranks: Mapping[str, int],
        end: Callable[[], None] | None,
    ) -> None:
        self.link, self._end = link, end
        self._has_tokenizer = not arguments.get("skip_tokenizer_init")
        self.other_ranks = ", ".join(f"{n}={size}" for n, size in other_ranks.items() if size > 1)

    def generate(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """See `Backend`."""
        if not requests:
            return []
        if not self._has_tokenizer and any(one.text is not None for one in requests):
            raise ConfigError(
                "the engine has no tokenizer for texts: pass token ids, or start the engine with "
                "skip_tokenizer_init=False"
            )
        with self.control.request():
            return self._samples(requests, timeout)

    def _samples(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        raise NotImplementedError

    def maps_regions(self, timeout: float) -> bool:
        """See `Backend`."""
        states = self.link.states(timeout)
        own = domain()
        return bool(states and own) and all(state.domain == own for state in states)

    def _check_payloads(self, tensors: SharedTensors) -> None:
        """Raise `ConfigError` unless there is a payload for each rank."""
        if len(tensors.payloads) != self.tp_size:
            raise ConfigError(
                f"the engine has {self.tp_size} ranks, but there are {len(tensors.payloads)} "
                "payloads: there must be one for each rank"
            )

    def death(self) -> str:
        """See `Backend`."""
        return self.link.death()

    def close(self) -> None:
        """See `Backend`."""
        end, self._end = self._end, None
        if end is not None:
            end()


def ranks_in(arguments: Mapping[str, Any], name: str) -> int:
    """Return the number of ranks in an engine's argument `name`; 1 if it is missing or 0."""
    value = arguments.get(name)
    if value is None:
        return 1
    if not is_whole(value) or value < 0:
        raise EngineError(
            f"the engine reports {name}={str(value)[:80]!r}, which is not a number of ranks"
        )
    return int(value) or 1
