"""Process groups that contain a trainer and an engine's ranks, but are not in torch's own table.

SGLang joins such a group with `init_custom_process_group`, in which torch creates the group on a
store with the group's name as the prefix. `create_group` uses the same prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from memsaver.errors import InvalidStateError

from ..errors import EngineError, EngineTimeoutError

__all__ = ["Receiver", "create_group"]

# NCCL's watchdog kills the process after this timeout, so callers limit their own waits.
_NEVER = timedelta(days=365)
_POLL_SECONDS = 0.001


def create_group(
    store: Any,
    name: str,
    backend: str,
    rank: int,
    size: int,
    timeout: timedelta,
    gloo_device: Any = None,
) -> Any:
    """Create a process group. With gloo, wait until all ranks have joined.

    Args:
        store: the group's store.
        name: the group's name.
        backend: either "nccl" or "gloo".
        rank: this process's rank.
        size: the number of ranks.
        timeout: the limit on the wait for the other ranks; with gloo, also on each operation.
        gloo_device: the device that gloo uses; None lets torch choose the device.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    config = c10d.BackendConfig(c10d.Backend(backend))
    first = next(iter(config.get_device_backend_map()))
    for prefix in (name, f"{name}/", f"{first}/"):  # the same prefixes as in torch and SGLang
        store = dist.PrefixStore(prefix, store)
    group: Any
    if backend == "gloo":
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        device = gloo_device or dist.ProcessGroupGloo.create_default_device()
        options._devices = [device]
        group = dist.ProcessGroupGloo(store, rank, size, options)
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        options.global_ranks_in_group, options.group_name = [], name
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:  # torch does this on all ranks
        group = c10d._create_process_group_wrapper(
            wrapped_pg=group,
            store_prefix=name,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
        )
    return group


class Receiver:
    """An engine's rank in a group whose rank 0 broadcasts tensors.

    Only one thread at a time may use an object.

    Args:
        name: the group's name.
        address: the address of the group's store.
        port: the port of the group's store.
        backend: either "nccl" or "gloo".
        rank: this process's rank in the group, at least 1.
        size: the number of ranks.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(
        self,
        name: str,
        address: str,
        port: int,
        backend: str,
        rank: int,
        size: int,
        timeout: float,
    ) -> None:
        from torch.distributed import TCPStore

        wait = timedelta(seconds=timeout)
        store = TCPStore(address, port, size, False, wait, wait_for_workers=False)
        self._backend = backend
        self._group = create_group(store, name, backend, rank, size, wait)

    def device(self, own: Any) -> Any:
        """Return the device for received tensors: the GPU `own` of this process, or the host."""
        return "cpu" if self._backend == "gloo" else own

    def receive(self, tensors: Sequence[Any], timeout: float) -> None:
        """Receive tensors from rank 0 into these contiguous tensors.

        Raises:
            EngineTimeoutError: the tensors did not arrive in time. The group is closed.
            EngineError: a broadcast failed. The group is closed.
            InvalidStateError: the group is closed.
        """
        from torch.distributed import BroadcastOptions

        group = self._group
        if group is None:
            raise InvalidStateError(
                "the group is closed, because earlier weights did not arrive: leave it, and join "
                "it again"
            )
        options = BroadcastOptions()
        options.rootRank = 0
        if self._backend == "gloo":
            options.timeout = timedelta(seconds=timeout)
        deadline = time.monotonic() + timeout
        try:
            works = [group.broadcast([tensor], options) for tensor in tensors]
            for work in works:
                while not work.is_completed() and time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS)
                if not work.is_completed():
                    break
                work.wait()
            else:
                return
        except RuntimeError as error:
            self.close()
            raise EngineError(f"the weights did not arrive: {error}") from error
        self.close()
        raise EngineTimeoutError(f"the weights did not arrive within {timeout:g} s")

    def close(self) -> None:
        """Leave the group, without waiting for other ranks. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self._backend == "nccl":
            group.abort()
        elif group is not None:
            group.shutdown()
