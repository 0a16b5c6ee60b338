"""`EngineStart`: starts and restarts an engine in the process of its group's leader."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from memsaver._runtime.interrupts import signals_deferred
from memsaver.errors import ConfigError, InvalidStateError

from ..engine.errors import EngineDiedError
from ..engine.fields import is_whole
from ..engine.interface import Backend
from .arguments import check_equal
from .fence import Fence
from .ranks import Layout, NotInMeshError
from .restarts import Restarter, Restarts
from .shared_sleep import SharedSleep, known_released
from .together import GRACE_SECONDS, Together, refuse

__all__ = ["EngineStart", "Nodes"]

_LANE = "rollout"


@dataclass(frozen=True)
class Nodes:
    """The parts of an engine that spans several hosts; all parts have the same number of ranks.

    Attributes:
        size: the number of ranks in the engine.
        first: a function that starts the first part on the leader while the other parts start, and
            returns the backend.
        others: for each other host, the data that the host's first rank uses to start the host's
            part.
    """

    size: int
    first: Callable[[], Backend]
    others: tuple[object, ...]


class EngineStart(SharedSleep):
    """A base class of `RolloutEngine` that starts an engine on the leader of a group.

    Attributes:
        layout: the place of this rank.
        backend: the engine, on the leader; None on all other ranks.
        tp_size: the number of ranks in the engine.
        pad_token_id: see `RolloutEngine`.
    """

    layout: Layout
    backend: Backend | None
    tp_size: int
    pad_token_id: int
    _make: Callable[[], object]  # creates the backend, on the leader

    @signals_deferred()  # no handler may run between the collectives
    def _begin(
        self,
        find: Callable[[], Layout],
        timeout: float,
        pad_token_id: int,
        make: Callable[[Layout, list[Any]], Backend | Nodes | None],
        prepare: Callable[[], object] = lambda: None,
        restarts: Restarts | None = None,
        join: Callable[[Any], Callable[[], None]] | None = None,
    ) -> None:
        """Create the backend on the leader; a failure is raised on all ranks.

        Args:
            find: a function that returns the place of this rank.
            timeout: see `launch`.
            pad_token_id: see `launch`.
            make: a function that creates the backend on the leader from the results of `prepare` on
                all ranks.
            prepare: a function that is called on each rank of the group.
            restarts: see `launch`.
            join: a function that starts the part of an engine on another host from an item of
                `Nodes.others`, and returns a function that stops this part.
        """
        self.timeout, self.pad_token_id = timeout, pad_token_id
        self.backend: Backend | None = None
        self._restarter: Restarter | None = None
        self._end_node: Callable[[], None] = lambda: None
        self._closed = False
        self._updates = 0  # the number of weight updates that have begun
        self._connections = contextlib.ExitStack()  # closed by `close`
        try:
            layout = find()
        except NotInMeshError:
            raise
        except Exception as error:
            refuse(error, timeout, (_LANE, Fence.LANE))
        self.layout = layout

        def check() -> tuple[dict[str, str], object]:
            if not is_whole(pad_token_id):
                raise ConfigError(f"pad_token_id must be an integer, not {pad_token_id!r}")
            if restarts is not None:
                if not isinstance(restarts, Restarts):
                    raise ConfigError(
                        f"restarts must be a `Restarts` or None, not a {type(restarts).__name__}"
                    )
                restarts.check()
            return {"restarts": "None" if restarts is None else restarts.limits}, prepare()

        def begin(
            everyones: list[tuple[dict[str, str], object]],
        ) -> tuple[int, frozenset[str] | tuple[object, ...] | None]:
            check_equal(layout.tp_ranks, [given for given, _ in everyones])
            prepared = [prepared for _, prepared in everyones]
            made = make(layout, prepared)
            if not isinstance(made, Nodes):
                self._make = lambda: make(layout, prepared)
                return self._adopt(made)
            if restarts is not None:
                raise ConfigError("an engine on several hosts cannot be restarted: see `restarts`")
            self._make = made.first
            return made.size, made.others

        try:
            self._connect()
            failure: BaseException | None = None
            what = "the start of the engine"
            try:
                self.tp_size, rest = self.together.gathered(what, check, begin, timeout)
                self._released = self._start_nodes(rest, join) if isinstance(rest, tuple) else rest
            except BaseException as error:  # the ranks of other engines wait
                failure = error
            self._fence.wait("the start of all engines", failure, timeout)
            limits = None if restarts is None else restarts.limits
            self._fence.wait(f"the start of all engines, restarts: {limits}", None)
            if restarts is not None:
                self._restarter = Restarter(self, restarts)
                self._connections.callback(self._restarter.close)
        except BaseException:
            self.close()
            raise

    def _start_nodes(
        self, others: tuple[object, ...], join: Callable[[Any], Callable[[], None]] | None
    ) -> frozenset[str] | None:
        """Start the parts of an engine on all of its hosts; return the engine's released tags."""
        each = self.tp_size // (1 + len(others))  # the number of ranks on a host
        rank = self.layout.tp_rank

        def work() -> frozenset[str] | None:
            if self.layout.is_leader:
                return self._adopt(self._make())[1]
            if rank < self.tp_size and rank % each == 0:
                assert join is not None
                self._end_node = join(others[rank // each - 1])
            return None

        what = "the start of the engine on all hosts"
        return self.together.gather(what, work, self.timeout + GRACE_SECONDS)[0]

    def _adopt(self, made: object) -> tuple[int, frozenset[str] | None]:
        """Set the backend; return the engine's number of ranks and its released tags."""
        if made is None:
            raise ConfigError("the leader of the group has no engine")
        if not all(hasattr(made, name) for name in ("tp_size", "control", "close")):
            raise ConfigError(
                f"a {type(made).__name__} is not a `Backend`: pass a server's URL or an engine to "
                "RolloutEngine.connect"
            )
        self.backend = backend = cast("Backend", made)
        if self._closed:  # another thread has closed the engine during a restart
            backend.close()
        self._check_open()
        return backend.tp_size, known_released(backend)

    def _start_again(self) -> None:
        """If the engine died, kill its remaining processes and restart it.

        This is a collective call of all ranks of the engine's group.
        """

        def work() -> tuple[int, frozenset[str] | None]:
            self._end_dead()
            if self.backend is not None:
                return self.backend.tp_size, known_released(self.backend)
            return self._adopt(self._make())

        self.tp_size, self._released = self._generating.gathered(
            "the restart of the engine",
            lambda: self._check_call(self.timeout),
            lambda _: work(),
            self.timeout,
        )

    def _end_dead(self) -> None:
        """Kill the remaining processes of an engine that died. Call this only on the leader."""
        backend = self.backend
        if backend is not None and backend.death():
            self.backend = None
            backend.close()

    def _connect(self) -> None:
        """Connect this rank to the ranks of its engine and of all other engines. A collective."""
        layout, timeout, refused = self.layout, self.timeout, None
        lanes = _LANE, *(Fence.LANE for _ in layout.dp_groups)
        call = tuple(zip(lanes, layout.mesh_groups, strict=False))  # empty if unknown
        try:
            self.together = Together(layout.tp_group, timeout, _LANE, call=call)
            self._connections.callback(self.together.close)
            self._generating = Together(layout.tp_group, timeout, "rollout/generate")
            self._connections.callback(self._generating.close)
        except BaseException as error:  # the ranks of other engines wait
            refused = error
        self._fence = Fence(layout, timeout, refused, call=call)
        self._connections.callback(self._fence.close)

    def close(self) -> None:
        """Stop the engine if this object started it.

        The method is idempotent and does not wait for other ranks. The method also closes the
        connections to other ranks and drops the process groups of `layout`, so that
        torch.distributed can be shut down and initialized again. Make no other call afterwards.
        """
        self._closed = True
        try:
            if self.backend is not None:
                self.backend.close()
            end, self._end_node = self._end_node, lambda: None
            end()
        finally:
            self._connections.close()
            self.layout = self.layout.without_groups()
            self._make = lambda: None  # replaced, because the original may keep a mesh alive

    @property
    def _engine(self) -> Backend:
        """The leader's engine, for operations that the leader performs for all ranks."""
        self._check_open()
        if self.backend is None:
            raise EngineDiedError("the engine died, and was not started again")
        return self.backend

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidStateError("the rollout engine is closed")
