"""Wrap the measured memory savers, in torch mode, in a common interface."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

OURS = "memsaver"
DEFAULT, RETAINED = "tms", "tms-retained"

# In the order of the rows.
PEERS = {DEFAULT: "torch_memory_saver", RETAINED: "torch_memory_saver, retained backup"}


class Library(Protocol):
    """The operations of a memory saver that the benchmarks measure."""

    def region(
        self, tag: str, backup: str = "none", devices: Sequence[int] = (0,)
    ) -> AbstractContextManager[Any]:
        """Assign tensors created in the block to the tag. `backup` is "none", "host" or "disk"."""

    def pause(self, tag: str) -> object:
        """Release the tag's memory."""

    def resume(self, tag: str) -> object:
        """Map the tag's memory again."""

    def swap(self, out: str, into: str) -> object:
        """Pause one tag and resume another."""

    def trim(self) -> None:
        """If possible, release host memory that no paused tag needs."""

    def use_disk(self, directory: str) -> None:
        """Set the directory for backups on disk."""


class Memsaver:
    """The library memsaver."""

    def __init__(self) -> None:
        import memsaver

        # `swap` is looked up at each call, so a version without it can run other measurements.
        self._memsaver: Any = memsaver
        self.pause = memsaver.pause
        self.resume = memsaver.resume

    def region(
        self, tag: str, backup: str = "none", devices: Sequence[int] = (0,)
    ) -> AbstractContextManager[Any]:
        chosen = list(devices) if len(devices) > 1 else None
        found: AbstractContextManager[Any] = self._memsaver.region(
            tag, backup=backup, device=chosen
        )
        return found

    def swap(self, out: str, into: str) -> object:
        return self._memsaver.swap(out=out, into=into)

    def trim(self) -> None:
        self._memsaver.trim(wait=True)

    def use_disk(self, directory: str) -> None:
        self._memsaver.configure(disk_dir=directory)


class TorchMemorySaver:
    """The library torch_memory_saver, which must be importable."""

    def __init__(self, retained: bool) -> None:
        from torch_memory_saver import torch_memory_saver as saver

        saver.hook_mode = "torch"
        if retained:
            saver.retain_cpu_backup = True
        self._saver = saver
        self.pause = saver.pause
        self.resume = saver.resume

    def region(
        self, tag: str, backup: str = "none", devices: Sequence[int] = (0,)
    ) -> AbstractContextManager[Any]:
        if len(devices) > 1:
            raise ValueError("torch_memory_saver is measured on one device")
        found: AbstractContextManager[Any] = self._saver.region(
            tag=tag, enable_cpu_backup=backup == "host", enable_disk_backup=backup == "disk"
        )
        return found

    def swap(self, out: str, into: str) -> object:
        self._saver.pause(out)
        return self._saver.resume(into)

    def trim(self) -> None:
        pass

    def use_disk(self, directory: str) -> None:
        self._saver.set_disk_backup_dir(directory)


def open_library(name: str) -> Library:
    """Return the library with this name, OURS or a key of PEERS. A process can use only one."""
    if name == OURS:
        return Memsaver()
    if name not in PEERS:
        raise ValueError(f"no library is called {name!r}")
    return TorchMemorySaver(retained=name == RETAINED)
