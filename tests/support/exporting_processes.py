"""Processes that export memory and are killed while another process maps the memory.

    python -m exporting_processes FD

The program is the server that forks these processes; see `forked_processes`. The program loads
torch; processes that only import this module do not need torch. Each exportable allocation of a
simulated device is a file that exists while a process has the file open or mapped.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import signal
from typing import Any

from forked_processes import Forked, Server, serve, wait_until

import memsaver
from memsaver import simulator
from memsaver._memory.sharing import exporter, sending, sent_storages, wire
from memsaver._runtime.native import _C

PROGRAM = ("-m", "exporting_processes")
_TAG = "exported"
_FILE = "/memfd:memsaver-sim-memory"


class _Exporter:
    """An exporter in its own process: each method handles a request."""

    def __init__(self) -> None:
        self._tensors: dict[int, Any] = {}

    def endpoint(self) -> str:
        return exporter.endpoint()

    def use_granularity(self, nbytes: int) -> None:
        """Set the granularity of device memory, before the driver starts."""
        simulator.control().sim_granularity(ctypes.c_uint64(nbytes))

    def send(self, key: int, device: int, data: bytes) -> tuple[Any, ...]:
        """Create a tensor with these bytes and return its location, as `Sharing.reduced` does."""
        import torch

        with memsaver.region(_TAG, backup="host", shareable=True):
            tensor = simulator.empty(len(data), dtype=torch.uint8, device=device)
        self._tensors[key] = tensor
        self.write(key, 0, data)
        _, arguments = sending.reduce(tensor, _TAG)
        return tuple(arguments[-1])

    def write(self, key: int, start: int, data: bytes) -> None:
        ctypes.memmove(self._tensors[key].data_ptr() + start, data, len(data))

    def digest(self, key: int) -> bytes:
        tensor = self._tensors[key]
        memory = (ctypes.c_char * tensor.numel()).from_address(tensor.data_ptr())
        return hashlib.blake2b(memory).digest()

    def held(self) -> int:
        """Return the number of tensors that other processes use."""
        return exporter.held()

    def clear(self) -> None:
        """Delete all tensors, including those of messages in transit."""
        self._tensors.clear()
        sent_storages.forget_expired(math.inf)

    def end_after(self, answers: int) -> None:
        """Send one extent per answer, and exit after this number of answers."""
        send, left = wire.send, iter(range(answers))

        def counted(connection: Any, message: wire.Message, *rest: Any, **options: Any) -> None:
            if "extents" in message and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            send(connection, message, *rest, **options)

        wire.MOST_FILES, wire.send = 1, counted

    def importers(self) -> list[Any]:
        return list(_C.importers())


def files_of(pid: int) -> set[int]:
    """Return the inodes of the exportable memory that a process has open or mapped."""
    found = set()
    with open(f"/proc/{pid}/maps") as maps:
        found.update(int(line.split()[4]) for line in maps if _FILE in line)
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(entry.path).startswith(_FILE):
                found.add(entry.stat().st_ino)
        except FileNotFoundError:  # closed in the meantime
            pass
    return found


class Exporter:
    """An exporting process.

    Attributes:
        is_dead: whether the exporter was killed.
    """

    def __init__(self, process: Forked) -> None:
        self.process = process
        self.endpoint: str = process.ask("endpoint")
        self.is_dead = self._ends = False
        self._files: set[int] = set()

    def end_after(self, answers: int) -> None:
        """Make the exporter exit during an import, after `answers` answers of one extent each."""
        self.process.ask("end_after", answers)
        self._files = files_of(self.process.pid)
        self._ends = True

    def kill(self) -> None:
        """Kill the exporter if it is still running, and wait until it has exited."""
        pid = self.process.pid
        if not self._ends:
            self._files = files_of(pid)
        self.process.kill()
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), f"exporter {pid} does not end")
        self.is_dead = True

    def has_memory_in(self, pid: int) -> bool:
        """Return whether another process still uses memory of this dead exporter."""
        return not self._files.isdisjoint(files_of(pid))


class Exporters:
    """The exporting processes; exactly one process is alive between sequences.

    Attributes:
        is_used: whether an exporter has sent memory in this sequence.
    """

    def __init__(self) -> None:
        self._server = Server(*PROGRAM)
        self._last = Exporter(self._server.start())
        self.is_used = False

    def alive(self) -> Exporter:
        """Return the live exporter; if no exporter is alive, start one."""
        if self._last.is_dead:
            self._last = Exporter(self._server.start())
        return self._last

    def clear(self) -> None:
        """Free the live exporter's memory at the end of a sequence."""
        ask = self.alive().process.ask
        if self.is_used:
            ask("clear")
            wait_until(lambda: not ask("importers"), "an exporter's freed memory stays imported")
        self.is_used = False

    def reset(self) -> None:
        """Replace the exporter after a failed sequence."""
        self._last.process.kill()
        self._last = Exporter(self._server.start())
        self.is_used = False


if __name__ == "__main__":
    import torch  # noqa: F401 - before the processes are forked

    serve(_Exporter)
