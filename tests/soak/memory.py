"""The memory of a soak test: torch tensors on a GPU, or buffers of the simulated driver.

Both classes have the same methods, so a walk can use either class. Only one thread can use an
object.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memsaver
from memsaver import simulator
from memsaver.errors import MemsaverError

MIB = 1 << 20
GIB = 1 << 30
OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@dataclass(frozen=True)
class Limits:
    """The limits of a process's memory, in bytes.

    `budget` is the limit for all tensors together, `host` is the limit for all backups together,
    `tag` contains the limit of a tag for each kind of backup, and `tensor` is the limit for a
    single tensor. `leave` bytes stay free when memory without a tag is allocated.
    """

    budget: int
    host: int
    tensor: int
    tag: dict[str, int]
    leave: int


def resources() -> dict[str, int]:
    """Return this process's use of system resources."""
    ctypes.CDLL(None).malloc_trim(0)
    rss = Path("/proc/self/statm").read_text().split()[1]
    stats = memsaver.stats()
    return {
        "resident_bytes": stats.resident_bytes,
        "backup_host_bytes": stats.host_bytes,
        "backup_disk_bytes": stats.disk_bytes,
        "process_bytes": int(rss) * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


class SimulatedMemory:
    """Buffers on this process's own simulated device. The competing process is also simulated."""

    has_graphs = False
    copies_of_its_own = False  # no other process uses the device

    def __init__(self, seed: int, gib: float | None) -> None:
        from simulated_driver import Simulator

        self._random = random.Random(seed)
        self._sim = Simulator()
        memsaver.device_memory(0)
        total = int((gib or 0.15) * GIB)
        self.limits = Limits(
            budget=total,
            host=48 * MIB,
            tensor=8 * MIB,
            tag={
                "none": total // 3,
                "host": 30 * MIB,
                "pageable": 12 * MIB,
                "disk": 6 * MIB,
            },
            leave=0,
        )
        self._total = total
        self.let_go()

    @property
    def device(self) -> str:
        return "simulated"

    def tensor(self, nbytes: int) -> Any:
        return simulator.buffer(nbytes)

    def address(self, tensor: Any) -> int:
        return int(tensor.address)

    def zero(self, tensor: Any) -> None:
        ctypes.memset(tensor.address, 0, tensor.nbytes)

    def fill(self, tensor: Any) -> None:
        ctypes.memmove(tensor.address, self._random.randbytes(tensor.nbytes), tensor.nbytes)

    def take(self, nbytes: int) -> None:
        """Make another process allocate `nbytes` bytes."""
        self._sim.occupy(memsaver.device_memory(0)[1] - self._total + nbytes)

    def let_go(self) -> None:
        """Free the other process's memory, so that this process can use its whole limit."""
        self.take(0)

    def is_out_of_memory(self, error: Exception) -> bool:
        return getattr(error, "cuda_error", 0) == OUT_OF_MEMORY

    @contextlib.contextmanager
    def faults(self) -> Iterator[bool]:
        """Occasionally make a driver call in the block fail; yield whether a call can fail."""
        if self._random.random() > 0.25:
            yield False
            return
        call, code = self._random.choice(_FAULTS)
        with self._sim.fault(call, code, nth=self._random.randint(1, 5)):
            yield True

    def wait_stream(self, transition: memsaver.Transition) -> None:
        with self._sim.stream() as stream:
            transition.wait_stream(stream.value)

    def tidy(self) -> None:
        gc.collect()

    def figures(self) -> dict[str, int]:
        memsaver.trim(wait=True)
        self.let_go()
        totals = self._sim.counts()
        names = ("handles", "mappings", "allocations", "registered_bytes", "streams", "events")
        held = {name: getattr(totals, name) for name in names}
        return {**resources(), **held, "free_bytes": memsaver.device_memory(0)[0]}

    def violations(self) -> list[str]:
        return self._sim.violations()

    def kept(self) -> str:
        """Describe the owners of memory that the allocator above the tags reports."""
        return f"{self._sim.counts()}"


_FAULTS = [
    ("cuMemCreate", OUT_OF_MEMORY),
    ("cuMemMap", 1),
    ("cuMemUnmap", 1),
    ("cuMemSetAccess", 1),
    ("cuMemHostRegister", OUT_OF_MEMORY),
    ("cuMemcpyDtoHAsync", 1),
    ("cuMemcpyHtoDAsync", 1),
]


class TorchMemory:
    """torch tensors on GPU 0, which other processes also use."""

    has_graphs = True

    def __init__(self, seed: int, gib: float | None) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator(device="cuda")
        self._generator.manual_seed(seed)
        self._random = random.Random(seed)
        self._taken: Any = None
        free = torch.cuda.mem_get_info(0)[0]
        budget = int(gib * GIB) if gib else int(0.6 * free)
        host = min(12 * GIB, budget // 4)
        self.limits = Limits(
            budget=budget,
            host=host,
            tensor=max(min(4 * GIB, budget // 16), 16 * MIB),
            tag={
                "none": budget // 3,
                "host": host * 6 // 10,
                "pageable": min(GIB, host // 8),
                "disk": min(GIB // 2, host // 8),
            },
            leave=2 * GIB,
        )
        # The first use of a kernel loads it, which needs device memory and must not be captured.
        first = torch.ones(MIB, dtype=torch.uint8, device="cuda")
        self.fill(first)
        self.zero(first)
        self.inputs = torch.zeros(MIB, dtype=torch.int64, device="cuda")
        self.reference = torch.zeros_like(self.inputs)
        (self.inputs * 3 + 1).sqrt()
        self.inputs.fill_(7)
        torch.cuda.synchronize()

    @property
    def device(self) -> str:
        return str(self._torch.cuda.get_device_name(0))

    def tensor(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, device="cuda")

    def address(self, tensor: Any) -> int:
        return int(tensor.data_ptr())

    def zero(self, tensor: Any) -> None:
        tensor.zero_()

    def fill(self, tensor: Any) -> None:
        tensor.view(self._torch.int64).random_(generator=self._generator)

    def take(self, nbytes: int) -> None:
        """Allocate `nbytes` bytes without a tag, as another process would."""
        self.let_go()
        self._taken = self.tensor(nbytes)

    def let_go(self) -> None:
        if self._taken is not None:
            self._taken = None
            self._torch.cuda.empty_cache()

    def is_out_of_memory(self, error: Exception) -> bool:
        if isinstance(error, MemsaverError):
            return error.cuda_error == OUT_OF_MEMORY
        return isinstance(error, RuntimeError) and "out of memory" in str(error)

    @contextlib.contextmanager
    def faults(self) -> Iterator[bool]:
        """Do nothing, because a real driver's calls cannot be made to fail."""
        yield False

    def wait_stream(self, transition: memsaver.Transition) -> None:
        transition.wait_stream(self._torch.cuda.current_stream())

    def tidy(self) -> None:
        gc.collect()
        self._torch.cuda.synchronize()
        self._torch.cuda.empty_cache()

    def figures(self) -> dict[str, int]:
        self.let_go()
        self.tidy()
        memsaver.trim(wait=True)
        return {
            **resources(),
            "torch_bytes": self._torch.cuda.memory_reserved(),
            "free_bytes": memsaver.device_memory(0)[0],
        }

    def violations(self) -> list[str]:
        return []  # the driver would have ended the context

    def kept(self) -> str:
        """Describe torch's segments in pools: the pool, the size in MiB, and the states of the
        blocks.
        """
        return str(
            [
                (
                    one["segment_pool_id"],
                    one["total_size"] / MIB,
                    {b["state"] for b in one["blocks"]},
                )
                for one in self._torch.cuda.memory_snapshot()
                if tuple(one["segment_pool_id"]) != (0, 0)
            ]
        )

    def capture(self, tag: str, backup: str) -> Graph:
        return Graph(self, self._torch, tag, backup, self._random.randrange(1, 1000))


class Graph:
    """A captured computation with its temporaries and result in a tag."""

    def __init__(self, memory: TorchMemory, torch: Any, tag: str, backup: str, number: int) -> None:
        self._memory = memory
        self._torch = torch
        self._number = number
        self._graph = torch.cuda.CUDAGraph()
        with memsaver.graph(self._graph, tag=tag, backup=backup):
            self._result = memory.inputs * 3 + number

    def close(self) -> None:
        """Release the graph's memory.

        Under compute-sanitizer, deleting a graph does not release its memory; the same is true of
        torch's own graphs.
        """
        self._graph.reset()

    def replay(self, value: int) -> tuple[Any, Any]:
        """Return the result of a replay with this input, and the expected tensor."""
        self._memory.inputs.fill_(value)
        self._graph.replay()
        self._memory.reference.fill_(3 * value + self._number)
        return self._result, self._memory.reference


MEMORIES = {"sim": SimulatedMemory, "gpu": TorchMemory}
Memory = SimulatedMemory | TorchMemory
