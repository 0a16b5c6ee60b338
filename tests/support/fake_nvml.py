"""A fake of the pynvml package."""

from __future__ import annotations

from types import SimpleNamespace


class Nvml:
    """A fake with the pynvml functions that memsaver calls.

    Attributes:
        rows: tuples of pid, name and bytes.
        broken: the names of the functions that raise.
        opened: the number of `nvmlInit` calls without an `nvmlShutdown` call.
        bus_ids: the devices that were looked up.
    """

    def __init__(self, rows, broken=()):
        self.rows, self.broken, self.opened = rows, broken, 0
        self.bus_ids: list[str] = []

    def nvmlInit(self):
        self._fail("nvmlInit")
        self.opened += 1

    def nvmlShutdown(self):
        self.opened -= 1

    def nvmlDeviceGetHandleByPciBusId(self, bus_id):
        self._fail("nvmlDeviceGetHandleByPciBusId")
        self.bus_ids.append(bus_id)
        return "handle"

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        self._fail("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, _, nbytes in self.rows]

    def nvmlSystemGetProcessName(self, pid):
        self._fail("nvmlSystemGetProcessName")
        return {row[0]: row[1] for row in self.rows}[pid]

    def _fail(self, name):
        if name in self.broken:
            raise RuntimeError(name)
