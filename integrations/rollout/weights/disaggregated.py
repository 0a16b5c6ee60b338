"""Weights to an engine on other GPUs: a process group of a trainer's leader and the engine's ranks.

The leader is its rank 0, and broadcasts each tensor of a bucket; the engine's ranks receive it into
memory of their own. SGLang's side is `init_custom_process_group`, and this one does what that does:
a store on the leader, with the group's name as a prefix, and torch's own helper on top.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from memsaver.errors import ConfigError, InvalidStateError, MemsaverError
from memsaver.integrations.rollout.together import check_timeout
from memsaver.integrations.sglang.errors import EngineError, EngineTimeoutError
from memsaver.interrupts import interrupts_deferred
from memsaver.latches import Latch

if TYPE_CHECKING:
    from memsaver.integrations.rollout.engine import RolloutEngine

__all__ = ["WeightGroup"]

Result = TypeVar("Result")

_BACKENDS = ("nccl", "gloo")
_END_SECONDS = 10.0  # for what the engine has answered already, or has given up, to end here
# NCCL's watchdog ends the process where an operation takes longer; `broadcast` sees to it before.
_NEVER = timedelta(days=365)
_numbers = itertools.count()


class WeightGroup:
    """A process group by which an engine that is elsewhere gets weights; see `update`.

    A collective of the engine's ranks, as are its methods; the group itself has the leader and the
    ranks of the engine only. Where a broadcast fails the group is of no more use: leave it, and
    join a new one.

        with WeightGroup(engine, address="10.0.0.7") as group:
            engine.update_weights(model, group=group, pause="retract")

    Args:
        engine: a `RolloutEngine`.
        address: this machine's, as the engine's ranks reach it.
        port: a free one there; 0 takes any.
        backend: of torch.distributed; "gloo" where one of the two sides has no GPU. With "nccl" on
            one host, start the trainer with NCCL_CUMEM_ENABLE=0, which SGLang sets in its own
            processes: NCCL cannot share buffers where the two differ.
        timeout: seconds to wait for the engine's ranks to join, and to leave. How long a broadcast
            may take, the update says.

    Raises:
        EngineError: the engine cannot join, or not in time. Nothing is left of the group here.
        ConfigError: there can be no store at this address, or an argument is not as above.
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
            raise ConfigError(f"engine is a RolloutEngine, not a {type(engine).__name__}")
        if backend not in _BACKENDS:
            raise ConfigError(f"backend is one of {', '.join(_BACKENDS)}, not {backend!r}")
        check_timeout(timeout)
        self._engine, self._backend, self._timeout = engine, backend, timeout
        self._lock = threading.Lock()  # of the two that follow, while the group is made
        self._group: Any = None
        self._abandoned = False
        self._broken = ""
        self.name = f"memsaver-{os.getpid()}-{next(_numbers)}"
        self.joined = False
        engine.together.on_leader(
            "joining a group for weights", lambda: self._join(address, port), timeout
        )
        self.joined = True

    def __enter__(self) -> WeightGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # What has failed is why it cannot be left, too, and says more.
        hidden = () if error is None else (MemsaverError,)
        with contextlib.suppress(*hidden):
            self.leave()

    @property
    def device(self) -> str:
        """Where tensors must be to be broadcast: "cuda" or "cpu"."""
        return "cpu" if self._backend == "gloo" else "cuda"

    def check(self) -> None:
        """Raise `InvalidStateError` where the group is of no use."""
        if not self.joined:
            raise InvalidStateError("the group was left: make a new one")
        if self._broken:
            raise InvalidStateError(
                f"the group broke when weights were sent: {self._broken}; leave it, and make a new "
                "one"
            )

    def broadcast(
        self, tensors: Sequence[Any], load: Callable[[], Result], timeout: float
    ) -> Result:
        """Broadcast tensors while the engine loads them. On the leader only.

        Args:
            tensors: contiguous, on `device`, and ready: nothing is waited for.
            load: asks the engine to load them, and ends within `timeout`.
            timeout: seconds.

        Raises:
            EngineTimeoutError: the engine said that it was done, and did not take all of it.
            EngineError: sending failed. What `load` raises passes through.
        """
        deadline = time.monotonic() + timeout
        sending = _Aside(lambda: self._send(tensors, timeout))
        try:
            result = load()
        except BaseException as error:
            # The engine's ranks may not come to the broadcasts at all.
            self._give_up(f"{type(error).__name__}: {error}")
            sending.wait(_END_SECONDS)
            if self._backend == "nccl" and isinstance(error, EngineError):
                error.message += _advice_for_nccl()
            raise
        if not sending.wait(max(_END_SECONDS, deadline - time.monotonic())):
            self._give_up("the engine did not take all of it")
            raise EngineTimeoutError(f"the engine did not take all weights within {timeout:g} s")
        if sending.error is not None:
            self._give_up(str(sending.error))
            advice = _advice_for_nccl() if self._backend == "nccl" else ""
            raise EngineError(
                f"weights could not be sent: {sending.error}{advice}"
            ) from sending.error
        return result

    def leave(self) -> None:
        """Leave the group, on both sides. Idempotent.

        Raises:
            EngineError: the engine cannot; it is left here all the same.
        """
        if not self.joined:
            return
        self.joined = False
        self._engine.together.on_leader("leaving a group for weights", self._leave, self._timeout)

    def _join(self, address: str, port: int) -> None:
        from torch.distributed import TCPStore

        if not isinstance(address, str) or type(port) is not int:
            raise ConfigError(
                f"address is a name or a number of this machine and port a number, not {address!r} "
                f"and {port!r}"
            )
        backend = self._engine.backend
        assert backend is not None
        size = 1 + self._engine.tp_size
        deadline = time.monotonic() + self._timeout
        wait = timedelta(seconds=self._timeout)
        try:
            store = TCPStore(
                address, port, size, True, wait, wait_for_workers=False, multi_tenant=True
            )
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"no group can be made at {address}:{port}: {error}") from error
        making = _Aside(lambda: self._make(store, size, wait))
        try:
            backend.join_group(
                address,
                store.port,
                rank_offset=1,
                world_size=size,
                group_name=self.name,
                backend=self._backend,
                timeout=self._timeout,
            )
            if not making.wait(max(_END_SECONDS, deadline - time.monotonic())):
                raise EngineTimeoutError(
                    f"the engine's ranks did not come to the group within {self._timeout:g} s"
                )
            if making.error is not None:
                raise EngineError(
                    f"the group could not be made here: {making.error}"
                ) from making.error
        except BaseException:
            self._end()
            raise

    def _make(self, store: Any, size: int, wait: timedelta) -> None:
        from torch.distributed import PrefixStore, distributed_c10d

        made, _ = distributed_c10d._new_process_group_helper(
            size,
            0,
            [],
            distributed_c10d.Backend(self._backend),
            PrefixStore(self.name, store),
            group_name=self.name,
            timeout=wait if self.device == "cpu" else _NEVER,
        )
        _keep_unsplit(made)
        with self._lock:
            self._group = made
            late = self._abandoned
        if late:
            self._end()

    def _end(self) -> None:
        """End the group on this side: now, or when it is made."""
        from torch.distributed import destroy_process_group

        with self._lock:
            self._abandoned = True
            group, self._group = self._group, None
        if group is not None:  # None would be the world; and this may hang as an abort may
            _Aside(lambda: destroy_process_group(group)).wait(_END_SECONDS)

    def _send(self, tensors: Sequence[Any], timeout: float) -> None:
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        if self.device == "cpu":
            options.timeout = timedelta(seconds=timeout)
        with _current_device(tensors):
            works = [self._group.broadcast([tensor], options) for tensor in tensors]
            for work in works:
                work.wait()
            if tensors and tensors[0].is_cuda:
                import torch

                torch.cuda.synchronize(tensors[0].device)

    def _give_up(self, why: str) -> None:
        self._broken = why
        # What a backend cannot abort, its timeout ends. NCCL may hang in an abort, for that long.
        _Aside(lambda: self._group.abort()).wait(_END_SECONDS)

    def _leave(self) -> None:
        backend = self._engine.backend
        assert backend is not None
        try:
            backend.leave_group(self.name, self._timeout)
        finally:
            self._end()


def _keep_unsplit(group: Any) -> None:
    """Have the group make a communicator of its own, before it makes one.

    Where the default group is bound to a device (`init_process_group(device_id=...)`), torch has
    NCCL split the default group's instead, in which all ranks of the trainer would have to join.
    """
    for backend in group._device_types:
        made = group._get_backend(backend)
        made = getattr(made, "wrapped_pg", made)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        options: Any = getattr(made, "options", None)
        if getattr(options, "split_from", None) is not None:
            options.split_from = None


def _advice_for_nccl() -> str:
    """What to look at where NCCL failed between this process and an engine's.

    Ranks on one host fail with "invalid argument" where one of them has virtual memory for NCCL's
    buffers and the other has not; SGLang and vLLM turn it off in their processes.
    """
    here = os.environ.get("NCCL_CUMEM_ENABLE")
    if here == "0":
        return ""
    return (
        f"; NCCL_CUMEM_ENABLE is {here or 'not set'} here, and SGLang sets 0 in its processes "
        "where it is not set: on one host both sides need the same, from their start"
    )


class _Aside:
    """Work on a thread of its own.

    Attributes:
        error: what it raised, or None.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._done = Latch()
        self._work = work
        with interrupts_deferred():
            threading.Thread(target=self._run, name="memsaver-weights", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self.error = error
        finally:
            self._done.open()

    def wait(self, seconds: float) -> bool:
        """Whether it ended within so many seconds."""
        return self._done.wait(seconds)


@contextlib.contextmanager
def _current_device(tensors: Sequence[Any]) -> Iterator[None]:
    """For the block, the tensors' device is this thread's."""
    if not tensors or not tensors[0].is_cuda:
        yield
        return
    import torch

    with torch.cuda.device(tensors[0].device):
        yield
