"""Sends weights to an engine on other GPUs, in a process group of the leader and its ranks.

The leader is rank 0 of the group and broadcasts each tensor of a bucket. The engine's ranks receive
it into their own memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from memsaver._runtime.timeouts import check_timeout
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError

from ...engine.errors import EngineError, EngineTimeoutError
from ...engine.fields import is_encodable
from ...engine.interface import JoinRequest
from ..arguments import check_equal
from .sender import END_SECONDS, Aside, Sender

if TYPE_CHECKING:
    from ..rollout_engine import RolloutEngine

__all__ = ["WeightGroup"]

Result = TypeVar("Result")

_BACKENDS = ("nccl", "gloo")


class WeightGroup:
    """A process group through which an engine on other GPUs receives weights. See `update`.

    The constructor and `leave` are collective calls of the trainer's ranks in the engine's mesh.
    The group itself contains only the leader and the engine's ranks. After a failed broadcast the
    group is unusable: leave it, and create a new one.

        with WeightGroup(engine, address="10.0.0.7") as group:
            engine.update_weights(model, group=group, pause="retract")

    Args:
        engine: a `RolloutEngine`.
        address: an address of this machine that the engine's ranks can reach. The group's store
            listens only at this address. So does gloo, unless GLOO_SOCKET_IFNAME names an
            interface. NCCL's sockets use the interfaces that NCCL_SOCKET_IFNAME names. Only the
            leader's address and port are used.
        port: a free port of this address; 0 chooses one.
        backend: the backend of torch.distributed; "gloo" if either side has no GPU. With "nccl" on
            one host, start the trainer with NCCL_CUMEM_ENABLE=0, as SGLang does for its own
            processes: NCCL cannot share buffers between processes with different values.
        timeout: seconds to wait for the engine's ranks to join, and to leave. Broadcasts use the
            update's timeout.

    Raises:
        EngineError: the engine cannot join in time. The group's sockets and store are closed.
        ConfigError: the address is not this machine's, the port is taken, an argument is invalid,
            or the ranks pass different backends.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        backend: str = "nccl",
        timeout: float = 120.0,
    ) -> None:
        if not hasattr(engine, "together"):
            raise ConfigError(f"engine must be a RolloutEngine, not {type(engine).__name__}")
        self._engine, self._backend, self._timeout = engine, backend, timeout
        self._broken = ""
        # Random, because an engine remembers the groups of trainers that were killed.
        self.name = f"memsaver-{secrets.token_hex(16)}"
        self.joined = False

        def check() -> dict[str, str]:
            if backend not in _BACKENDS:
                raise ConfigError(f"backend must be one of {', '.join(_BACKENDS)}, not {backend!r}")
            check_timeout(timeout)
            _check_address(address, port)
            self._sender = Sender(self.name, backend, 1 + engine.tp_size, timeout)
            return {"backend": repr(backend)}

        def join(everyones: list[dict[str, str]]) -> None:
            check_equal(engine.layout.tp_ranks, everyones)
            self._join(address, port)

        engine.together.gathered("joining a group for weights", check, join, timeout)
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

    def check(self) -> None:
        """Raise `InvalidStateError` if the group is unusable."""
        if not self.joined:
            raise InvalidStateError("this rank has left the group: create a new group")
        if self._broken:
            raise InvalidStateError(
                f"the group failed while weights were sent: {self._broken}; leave it, and make a "
                "new one"
            )

    def broadcast(
        self, tensors: Sequence[Any], load: Callable[[], Result], timeout: float
    ) -> Result:
        """Broadcast tensors while the engine loads them. Call it only on the leader.

        Args:
            tensors: contiguous tensors on `device`. Work that writes them must be complete: the
                call does not wait for it.
            load: makes the engine load them, and ends within `timeout`.
            timeout: seconds.

        Raises:
            EngineTimeoutError: the engine reported success without receiving all tensors.
            EngineError: sending failed. Exceptions of `load` propagate.
        """
        deadline = time.monotonic() + timeout
        sending = Aside(lambda: self._sender.send(tensors, timeout))
        try:
            result = load()
        except BaseException as error:
            # The engine's ranks may not take part in the broadcasts at all.
            self._give_up(f"{type(error).__name__}: {error}")
            sending.wait(END_SECONDS)
            if self._backend == "nccl" and isinstance(error, EngineError):
                error.message += _advice_for_nccl()
            raise
        if not sending.wait(max(END_SECONDS, deadline - time.monotonic())):
            self._give_up("the engine did not receive all weights")
            raise EngineTimeoutError(f"the engine did not receive all weights within {timeout:g} s")
        if sending.error is not None:
            self._give_up(str(sending.error))
            advice = _advice_for_nccl() if self._backend == "nccl" else ""
            raise EngineError(
                f"weights could not be sent: {sending.error}{advice}"
            ) from sending.error
        return result

    def leave(self) -> None:
        """Leave the group, on both sides. Idempotent.

        Closes this side's store, sockets, descriptors and threads; if a broadcast hangs, they are
        closed when it ends. NCCL keeps resources that it opens once per process, such as the
        listener of its RAS service, and one closed socket for each communicator.

        Raises:
            EngineError: the engine could not leave the group. This side has left it.
        """
        if not self.joined:
            return
        self.joined = False
        try:
            self._engine.together.on_leader(
                "leaving a group for weights", self._leave, self._timeout
            )
        finally:
            self._sender.close()

    def _join(self, address: str, port: int) -> None:
        backend = self._engine.backend
        assert backend is not None
        deadline = time.monotonic() + self._timeout
        taken = self._sender.listen(address, port)
        making = Aside(self._sender.connect)
        try:
            size = 1 + self._engine.tp_size
            joined = JoinRequest(self.name, address, taken, self._backend, size)
            backend.join_group(joined, self._timeout)
            if not making.wait(max(END_SECONDS, deadline - time.monotonic())):
                raise EngineTimeoutError(
                    f"the engine's ranks did not join the group within {self._timeout:g} s"
                )
            if making.error is not None:
                raise EngineError(
                    f"this side could not create the group: {making.error}"
                ) from making.error
        except BaseException:
            self._sender.close()
            making.wait(END_SECONDS)
            raise

    def _give_up(self, why: str) -> None:
        self._broken = why
        self._sender.abort()

    def _leave(self) -> None:
        backend = self._engine.backend
        assert backend is not None
        backend.leave_group(self.name, self._timeout)


def _check_address(address: object, port: object) -> None:
    if not is_encodable(address) or type(port) is not int or not 0 <= port < 1 << 16:
        raise ConfigError(
            "address must be a host name or an IP address of this machine, and port a number "
            f"from 0 to 65535, not {address!r} and {port!r}"
        )


def _advice_for_nccl() -> str:
    """Return advice for a failure of NCCL between this process and an engine's.

    Ranks on one host fail with "invalid argument" if only some of them use virtual memory for
    NCCL's buffers; SGLang and vLLM disable it in their processes.
    """
    here = os.environ.get("NCCL_CUMEM_ENABLE")
    if here == "0":
        return ""
    return (
        f"; NCCL_CUMEM_ENABLE is {here or 'not set'} in this process, and SGLang sets it to 0 in "
        "its processes if it is unset: on one host, both sides need the same value from the start"
    )
