"""Weight updates for engines on other GPUs, in a process group of a leader and the engines' ranks.

The leader is rank 0 of the group and broadcasts each tensor of a bucket. The engines' ranks receive
the tensors into their own memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.timeouts import check_timeout, seconds_until
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError

from ...engine.errors import EngineError, EngineTimeoutError
from ...engine.fields import is_encodable
from ...engine.interface import JoinRequest
from ..arguments import check_equal
from ..together import Together
from .sender import END_SECONDS, Aside, FailureNotice, Sender
from .update_steps import UpdateSteps

if TYPE_CHECKING:
    from ..engine_set import EngineSet
    from ..rollout_engine import RolloutEngine

__all__ = ["WeightGroup"]

Result = TypeVar("Result")

_BACKENDS = ("nccl", "gloo")
_POLL_SECONDS = 0.2


class WeightGroup:
    """A process group through which engines on other GPUs receive weights. See `update`.

    The constructor and `leave` are collective calls of the trainer's ranks in the engine's mesh.
    The group itself contains only one leader and the engines' ranks. After a failed broadcast, the
    group is unusable: leave the group and create a new one.

        with WeightGroup(engine, address="10.0.0.7") as group:
            engine.update_weights(model, group=group, pause="retract")

    Args:
        engine: a `RolloutEngine`, or an `EngineSet`, in which case the group contains all of its
            engines.
        address: an address of this machine that the engine's ranks can reach. The group's store
            listens only on this address. Gloo also listens only on this address, unless
            GLOO_SOCKET_IFNAME names an interface. NCCL's sockets use the interfaces that
            NCCL_SOCKET_IFNAME names. Only the leader's address and port are used.
        port: a free port on this address; 0 selects any free port.
        backend: the torch.distributed backend; "gloo" if either side has no GPU. With "nccl" on one
            host, start the trainer with NCCL_CUMEM_ENABLE=0, because SGLang sets this value in its
            own processes, and NCCL cannot share buffers between processes with different values.
        timeout: the time limit in seconds for the engine's ranks to join and to leave the group.
            Broadcasts use the update's timeout.
        whole_mesh: whether the ranks of all engines of the mesh form one group, in which the leader
            of the first engine broadcasts each bucket once. If False, each engine has its own
            group, in which the engine's own leader broadcasts.

    Raises:
        EngineError: an engine did not join in time. The group's sockets and store are closed, and
            engines that have already joined leave the group.
        ConfigError: the address does not belong to this machine, the port is in use, an argument is
            invalid, or the ranks of the mesh pass different arguments.
    """

    @signals_deferred()  # no handler may run between the collectives
    def __init__(
        self,
        engine: RolloutEngine | EngineSet,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        backend: str = "nccl",
        timeout: float = 120.0,
        whole_mesh: bool = False,
    ) -> None:
        if not hasattr(engine, "together"):
            raise ConfigError(f"engine must be a RolloutEngine, not {type(engine).__name__}")
        self._engine, self._backend, self._timeout = engine, backend, timeout
        self._whole_mesh = whole_mesh and engine.layout.dp_size > 1
        self._sender: Sender | None = None  # set only on the rank that broadcasts
        self._failure_notice: FailureNotice | None = None  # set on the other leaders only
        self._broken = ""
        self._member: object = None  # on a leader: the backend that has begun to join
        # Random, because an engine remembers the groups of trainers that were killed.
        self.name = f"memsaver-{secrets.token_hex(16)}"
        self.joined = False

        def check() -> dict[str, str]:
            if backend not in _BACKENDS:
                raise ConfigError(f"backend must be one of {', '.join(_BACKENDS)}, not {backend!r}")
            check_timeout(timeout)
            _check_address(address, port)
            return {"backend": repr(backend), "whole_mesh": repr(whole_mesh)}

        what = "joining a group for weights"
        self._compare(what, check)
        try:
            self._join(what, address, port)
        except BaseException:
            if self._sender is not None:
                self._sender.close()
            raise
        self.joined = True

    def __enter__(self) -> WeightGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # The block's own error is likely the cause of a failed leave, and more specific.
        hidden = () if error is None else (MemsaverError,)
        with contextlib.suppress(*hidden):
            self.leave()

    @property
    def device(self) -> str:
        """The device type of tensors for a broadcast: "cuda" or "cpu"."""
        return "cpu" if self._backend == "gloo" else "cuda"

    def check(self, engine: RolloutEngine | EngineSet) -> None:
        """Raise `InvalidStateError` if the group is unusable, `ConfigError` for another engine."""
        if engine is not self._engine:
            raise ConfigError("the group belongs to another engine: pass the engine's own group")
        if not self.joined:
            raise InvalidStateError("this rank has left the group: create a new group")
        if self._broken:
            raise InvalidStateError(
                f"the group failed while weights were sent: {self._broken}; leave it, and "
                "create a new one"
            )

    def broadcast(
        self, tensors: Sequence[Any], load: Callable[[], Result], timeout: float
    ) -> Result:
        """Broadcast tensors while the engine loads them. Call this method only on the leader.

        Args:
            tensors: contiguous tensors on `device`. All writes to the tensors must be complete,
                because the call does not wait for them.
            load: a function that makes the engine load the tensors, and returns within `timeout`.
            timeout: the time limit for the call, in seconds.

        Raises:
            EngineTimeoutError: the engine reported success without receiving all tensors.
            EngineError: sending failed. Exceptions of `load` propagate.
        """
        deadline = time.monotonic() + timeout
        sender = self._sender
        if sender is None:
            return self._receive(load)
        sending = Aside(lambda: sender.send(tensors, timeout))
        Aside(lambda: self._watch(sender, sending, deadline))
        try:
            result = load()
        except BaseException as error:
            # The engine's ranks may not take part in the broadcasts at all.
            self._give_up(f"{type(error).__name__}: {error}")
            self._withdraw()
            self._free(sender, sending)
            if self._backend == "nccl" and isinstance(error, EngineError):
                error.message += _advice_for_nccl()
            raise
        if not sending.wait(seconds_until(deadline, END_SECONDS)):
            self._give_up("the engine did not receive all weights")
            raise EngineTimeoutError(f"the engine did not receive all weights within {timeout:g} s")
        if sending.error is not None:
            self._give_up(str(sending.error))
            self._free(sender, sending)
            advice = _advice_for_nccl() if self._backend == "nccl" else ""
            raise EngineError(
                f"weights could not be sent: {sending.error}{advice}"
            ) from sending.error
        return result

    @signals_deferred()  # no handler may run between the collectives
    def leave(self) -> None:
        """Remove this process and the engine from the group. Idempotent.

        If the engine was restarted after it joined, it is no longer in the group and is not called.

        The method closes this side's store, sockets, descriptors and threads; if a broadcast hangs,
        they are closed when it ends. NCCL keeps one closed socket for each communicator, and the
        resources that NCCL opens once per process, such as the listener of its RAS service.

        Raises:
            EngineError: the engine could not leave the group, but this process has left the group.
        """
        if not self.joined:
            return
        self.joined = False
        what = "leaving a group for weights"
        try:
            with self._step(what) as own:
                own.on_leader(what, lambda: self._leave(self._timeout), self._timeout)
        finally:
            if self._sender is not None:
                self._sender.close()

    @contextlib.contextmanager
    def _step(self, what: str) -> Iterator[Together]:
        """Run the block on the ranks that share the group; raise any error on all of them."""
        if not self._whole_mesh:
            yield self._engine.together
            return
        with UpdateSteps(self._engine).step(what, self._timeout) as own:
            yield own

    def _compare(self, what: str, check: Callable[[], dict[str, str]]) -> None:
        """Check the arguments of all ranks of the mesh.

        If some arguments differ, all ranks raise an error.

        Args:
            what: a description of the call, the same on all ranks.
            check: a function that returns this rank's arguments by name, formatted for an error
                message, or raises an exception if an argument is invalid.
        """
        # The ranks wait for the engine's own timeout, because the group's may be invalid.
        steps, seconds = UpdateSteps(self._engine), self._engine.timeout
        own = self._engine.layout.tp_ranks
        given = steps.gather(what, check, seconds)
        rows = steps.along(what, [*zip(own, given, strict=True)], seconds)
        ranks, everyones = zip(*(one for row in rows for one in row), strict=True)
        check_equal(ranks, everyones)

    def _join(self, what: str, address: str, port: int) -> None:
        layout, timeout = self._engine.layout, self._timeout
        sizes = {layout.dp_rank: self._engine.tp_size}
        if self._whole_mesh:
            steps = UpdateSteps(self._engine)
            sizes = dict(steps.along(what, (layout.dp_rank, self._engine.tp_size), timeout))
        size = 1 + sum(sizes.values())
        offset = 1 + sum(sizes[number] for number in sizes if number < layout.dp_rank)
        sends = not self._whole_mesh or layout.dp_rank == 0

        def listen() -> tuple[str, str, int] | None:
            if not sends:
                return None
            self._sender = Sender(self.name, self._backend, size, timeout)
            return self.name, address, self._sender.listen(address, port)

        with self._step(what) as own:
            place = own.on_leader(what, listen, timeout)
        if self._whole_mesh:
            (place,) = [one for one in steps.along(what, place, timeout) if one is not None]
        assert place is not None
        self.name, address, port = place
        request = JoinRequest(self.name, address, port, self._backend, size, offset)
        if not sends:
            self._failure_notice = FailureNotice(self.name, address, port)
        try:
            with self._step(what) as own:
                own.on_leader(what, lambda: self._enter(request), timeout)
        except BaseException:
            self._abandon()  # some ranks of an engine, or other engines, may have joined
            raise

    def _enter(self, request: JoinRequest) -> None:
        """Make the engine join the group, while the sender creates the group on this side."""
        self._member = backend = self._engine._engine  # raises if the engine died
        sender = self._sender
        if sender is None:
            backend.join_group(request, self._timeout)
            return
        deadline = time.monotonic() + self._timeout
        making = Aside(sender.connect)
        try:
            backend.join_group(request, self._timeout)
            if not making.wait(seconds_until(deadline, END_SECONDS)):
                raise EngineTimeoutError(
                    f"the engine's ranks did not join the group within {self._timeout:g} s"
                )
            if making.error is not None:
                raise EngineError(
                    f"this side could not create the group: {making.error}"
                ) from making.error
        except BaseException:
            sender.close()
            making.wait(END_SECONDS)
            raise

    def _receive(self, load: Callable[[], Result]) -> Result:
        """Load tensors that another engine's leader broadcasts; notify that leader of a failure."""
        try:
            return load()
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            if self._failure_notice is not None:
                self._failure_notice.send()
            self._withdraw()
            raise

    def _withdraw(self) -> None:
        """Remove an engine that failed from the group of a whole mesh.

        The ranks of other engines might be waiting for this engine's ranks, because all ranks
        forward the tensors that they receive.
        """
        if self._whole_mesh:
            self._abandon()

    def _abandon(self) -> None:
        """Try to remove this leader's engine from the group after a failure."""
        with contextlib.suppress(MemsaverError):
            self._leave(END_SECONDS)

    def _watch(self, sender: Sender, sending: Aside, deadline: float) -> None:
        """End the engines' wait for a broadcast that will not complete.

        Either the broadcast itself has failed, or another engine of the mesh has failed and no
        longer receives tensors.
        """
        while not sending.wait(_POLL_SECONDS) and time.monotonic() < deadline:
            if sender.is_notified():
                self._give_up("another engine failed")
                self._free(sender, sending)
                return
        if sending.error is not None:
            self._give_up(str(sending.error))
            self._free(sender, sending)

    def _free(self, sender: Sender, sending: Aside) -> None:
        """Close a failed gloo group, which `abort` leaves open, to end the engines' waits.

        The connections stay open until the broadcast has ended.
        """
        if sending.wait(END_SECONDS) and self._backend == "gloo":
            sender.close()

    def _give_up(self, why: str) -> None:
        self._broken = self._broken or why
        if self._sender is not None:
            self._sender.abort()

    def _leave(self, timeout: float) -> None:
        """Remove this leader's engine from the group, unless it has not joined or was replaced."""
        member, self._member = self._member, None
        backend = self._engine.backend
        if backend is not None and backend is member:
            backend.leave_group(self.name, timeout)


def _check_address(address: object, port: object) -> None:
    if not is_encodable(address) or type(port) is not int or not 0 <= port < 1 << 16:
        raise ConfigError(
            "address must be a host name or an IP address of this machine, and port a number "
            f"from 0 to 65535, not {address!r} and {port!r}"
        )


def _advice_for_nccl() -> str:
    """Return advice for an NCCL failure between this process and an engine's processes.

    Ranks on one host fail with "invalid argument" if only some ranks use virtual memory for NCCL's
    buffers. SGLang and vLLM disable this use in their processes.
    """
    here = os.environ.get("NCCL_CUMEM_ENABLE")
    if here == "0":
        return ""
    return (
        f"; NCCL_CUMEM_ENABLE is {here or 'not set'} in this process, and SGLang sets it to 0 in "
        "its processes if it is unset: on one host, both sides need the same value from the start"
    )
