"""`EngineSet`: several engines that receive a trainer's weights together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from memsaver._runtime.interrupts import signals_deferred
from memsaver.errors import ConfigError, MemsaverError

from ..engine.errors import EngineError, EngineTimeoutError
from ..engine.interface import Backend, Broadcast, JoinRequest, PauseMode, WeightLoad
from ..engine.weights.checks import RankCheck, is_good, unknown_to_all
from .errors import WeightMismatchError
from .rollout_engine import RolloutEngine
from .weights.sender import END_SECONDS, Aside

__all__ = ["EngineSet"]

Result = TypeVar("Result")


class EngineSet:
    """A set of engines that receive weights from the same trainer ranks through one `WeightGroup`.

    Each bucket is broadcast once, and the ranks of all engines receive it:

        engines = EngineSet([RolloutEngine.connect(url) for url in urls])
        with WeightGroup(engines, address="10.0.0.7") as group:
            engines.update_weights(model, group=group, pause="retract")

    An update succeeds only if it succeeds on all engines. Otherwise, the error's message names the
    engines that failed. If an engine died, the call waits at most a few seconds for the other
    engines. After a failed update, the engines can contain a mix of old and new weights; repeating
    the call updates all engines. To continue without an engine that died, create a new set of the
    remaining engines and a new group.

    Make all other calls on the engines themselves. The set does not close its engines.

    Threads: updates use the connections of the first engine. On each rank, a single thread must
    make the set's update calls and all calls to the first engine except `generate`. The order of
    these calls must be the same on all ranks; otherwise, all ranks raise `RankError`. The other
    engines use their own connections, but they must not sleep during an update.

    Attributes:
        engines: the engines, in the order of their ranks in a group.
        layout: this rank's place in its mesh; the layout is the same for every engine.
        together: the connection through which the ranks update weights.
        backend: on the leader, the object that calls all engines; None on all other ranks.
        timeout: the default timeout of calls in seconds, taken from the first engine.

    Args:
        engines: the engines of the set; this rank must have the same place in all of them.

    Raises:
        ConfigError: the list is empty, it contains an engine twice, or its engines have different
            layouts.
    """

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self.engines = tuple(engines) if isinstance(engines, Iterable) else ()
        if not self.engines or not all(isinstance(one, RolloutEngine) for one in self.engines):
            raise ConfigError("an EngineSet takes a list of one or more RolloutEngines")
        places = {(one.layout.tp_ranks, one.layout.dp_rank) for one in self.engines}
        if len(places) > 1 or len(set(map(id, self.engines))) < len(self.engines):
            raise ConfigError(
                "the engines of an EngineSet must be different ones of the same ranks of the "
                "trainer"
            )
        first = self.engines[0]
        self.layout, self.together, self.timeout = first.layout, first.together, first.timeout
        self._fence = first._fence
        self._updates = 0  # the number of updates that have begun
        self.backend = _Backends(self.engines) if first.layout.is_leader else None

    @property
    def tp_size(self) -> int:
        """The total number of ranks in all engines."""
        return sum(one.tp_size for one in self.engines)

    @signals_deferred()  # no handler may run between the collectives
    def update_weights(self, state: Any, **options: Any) -> Any:
        """Send a trainer's weights to all engines. A collective.

        See `memsaver.integrations.rollout.weights.update`. The option `group` must be a
        `WeightGroup` of this set.
        """
        from . import weights

        return weights.update(self, state, **options)

    @property
    def _engine(self) -> _Backends:
        assert self.backend is not None
        return self.backend

    def _check_call(self, timeout: Any) -> None:
        for one in self.engines:
            one._check_call(timeout)

    def __repr__(self) -> str:
        return f"<memsaver EngineSet: {len(self.engines)} engines, {self.tp_size} ranks>"


class _Backends:
    """A `Backend` for weight updates that calls several engines concurrently."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._engines = engines
        self._joined: dict[str, list[Backend]] = {}  # by group name: the engines in the group

    @property
    def tp_size(self) -> int:
        return sum(one.tp_size for one in self._engines)

    @property
    def control(self) -> _Backends:
        return self

    def check(self, operation: str) -> None:
        # The query of an engine's state has its own timeout.
        timeout = max(one.timeout for one in self._engines)
        self._each(lambda backend, _: backend.control.check(operation), timeout)

    def maps_regions(self, timeout: float) -> bool:
        return False  # these engines receive weights only through a group

    def begin_update(self, timeout: float) -> None:
        self._each(lambda backend, _: backend.begin_update(timeout), timeout)

    def end_update(self, timeout: float, complete: bool = True) -> None:
        self._each(lambda backend, _: backend.end_update(timeout, complete), timeout)

    def pause_generation(self, mode: PauseMode, timeout: float) -> None:
        self._each(
            lambda backend, _: backend.pause_generation(mode, timeout), timeout, names_late=True
        )

    def continue_generation(self, timeout: float) -> None:
        self._each(
            lambda backend, _: backend.continue_generation(timeout), timeout, names_late=True
        )

    def join_group(self, group: JoinRequest, timeout: float) -> None:
        members = self._joined[group.name] = []

        def join(backend: Backend, first: int) -> None:
            members.append(backend)
            backend.join_group(replace(group, rank_offset=group.rank_offset + first), timeout)

        self._each(join, timeout)

    def leave_group(self, name: str, timeout: float) -> None:
        members = self._joined.pop(name, [])

        def leave(backend: Backend, first: int) -> None:
            if backend in members:  # neither removed after a failure nor restarted
                backend.leave_group(name, timeout)

        self._each(leave, timeout)

    def checksums(self, timeout: float) -> Sequence[str]:
        return [
            text
            for rows in self._each(lambda backend, _: backend.checksums(timeout), timeout)
            for text in rows
        ]

    def load_weights(self, load: WeightLoad) -> list[RankCheck]:
        """See `Backend`.

        The list is empty if an engine cannot verify weights and no other engine failed.
        """

        def receive(backend: Backend, _: int) -> list[RankCheck]:
            try:
                return backend.load_weights(load)
            except BaseException:
                # Other engines may be waiting for this engine's ranks, which forward the tensors
                # that they receive.
                self._withdraw(backend, load)
                raise

        each = self._each(receive, load.timeout)
        checks: list[RankCheck] = []
        first = 0
        for number, (engine, rows) in enumerate(zip(self._engines, each, strict=True)):
            name = self._name(number)
            unknown = sorted(unknown_to_all(rows))
            if unknown:
                error = WeightMismatchError(
                    f"{name} loads nothing from {', '.join(unknown[:8])}: its model may use other "
                    "names, or be another model; update all engines again"
                )
                error.tensors = tuple(unknown)
                raise error
            checks += [replace(row, rank=row.rank + first, engine=name) for row in rows]
            first += engine.tp_size
        return [] if not all(each) and is_good(checks) else checks

    def _withdraw(self, backend: Backend, load: WeightLoad) -> None:
        """Remove an engine that failed from the group of a broadcast."""
        if isinstance(load.tensors, Broadcast):
            name = load.tensors.group_name
            with contextlib.suppress(KeyError, ValueError):
                self._joined[name].remove(backend)
            with contextlib.suppress(MemsaverError):
                backend.leave_group(name, END_SECONDS)

    def _name(self, number: int) -> str:
        return f"engine {number + 1} of {len(self._engines)}"

    def _each(
        self, call: Callable[[Backend, int], Result], timeout: float, names_late: bool = False
    ) -> list[Result]:
        """Call all engines concurrently, and return their results.

        After an engine has failed, the call waits only `END_SECONDS` longer for the other engines,
        because they might be waiting for the failed engine.

        Args:
            call: the function that calls one engine; its arguments are the engine's backend and the
                engine's first rank among the ranks of all engines.
            timeout: the time limit for the call, in seconds.
            names_late: whether the error after an engine's failure also names the engines that did
                not respond in time. If False, the error names only the engines that failed.

        Raises:
            MemsaverError: the error of the first engine that failed, or an `EngineError` with that
                error as its cause. The message contains the names of all failed engines and the
                reasons.
        """
        results: list[list[Result]] = [[] for _ in self._engines]
        calls, first = [], 0
        for engine, result in zip(self._engines, results, strict=True):

            def make(engine: Any = engine, result: Any = result, first: int = first) -> None:
                result.append(call(engine._engine, first))

            calls.append(Aside(make))
            first += engine.tp_size
        failed = self._failures(calls, time.monotonic() + timeout + END_SECONDS, names_late)
        if failed:
            raise self._error(failed)
        return [result for (result,) in results]

    def _failures(
        self, calls: Sequence[Aside], deadline: float, names_late: bool
    ) -> dict[int, Exception]:
        """Wait for the calls to end, and return the errors of the calls that failed or are late."""
        failed: dict[int, Exception] = {}
        waiting = dict(enumerate(calls))
        while waiting and time.monotonic() < deadline:
            for number, one in list(waiting.items()):
                if not one.wait(0.01):
                    continue
                del waiting[number]
                if one.error is not None:
                    failed[number] = one.error
                    deadline = min(deadline, time.monotonic() + END_SECONDS)
        if names_late or not failed:
            for number in waiting:
                failed[number] = EngineTimeoutError("the engine did not answer in time")
        return failed

    def _error(self, failed: dict[int, Exception]) -> MemsaverError:
        reasons = [f"{self._name(number)}: {one}" for number, one in failed.items()]
        first = next(iter(failed.values()))
        if not isinstance(first, MemsaverError):
            error: MemsaverError = EngineError("; ".join(reasons))
            error.__cause__ = first
            return error
        first.message = "; ".join(reasons)
        return first
