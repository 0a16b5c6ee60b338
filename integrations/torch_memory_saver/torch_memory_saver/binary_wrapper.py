"""The internal interface that frameworks use: the state of the calling thread.

Frameworks use this interface to exclude the allocations of a library that creates its own buffers:
`torch_memory_saver._impl._binary_wrapper.cdll.tms_set_interesting_region(False)`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import memsaver
from memsaver._runtime.native import _C, Backup
from memsaver._transitions import parts
from torch_memory_saver.backups import BACKENDS

__all__ = ["BinaryWrapper", "ThreadState"]


class ThreadState:
    """The calling thread's state; the methods are named after the library's functions."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._local = _Switch()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """At the end of the block, re-enable a region that the block has disabled."""
        around, self._local.off = self._local.off, None
        try:
            yield
        finally:
            self.tms_set_interesting_region(True)
            self._local.off = around

    def tms_get_interesting_region(self) -> bool:
        """Return whether this thread's allocations currently belong to a tag."""
        return _C.region_tag() is not None

    def tms_set_interesting_region(self, interesting: bool) -> None:
        """Disable or enable the thread's innermost region; do nothing outside a region."""
        if interesting:
            off, self._local.off = self._local.off, None
            if off is not None:
                off.close()
        elif self._local.off is None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(memsaver.disabled())
                self._local.off = stack.pop_all()

    def tms_get_current_tag(self) -> bytes:
        """Return the tag of this thread's allocations."""
        return self._region()[0].encode()

    def tms_get_enable_cpu_backup(self) -> bool:
        """Return whether this thread's allocations have a backup in host memory."""
        return self._region()[1] in BACKENDS.values()

    def tms_get_enable_disk_backup(self) -> bool:
        """Return whether this thread's allocations have a backup on disk."""
        return self._region()[1] == "disk"

    def tms_get_cpu_backup_backend(self) -> bytes:
        """Return the kind of host memory for this thread's backups; the default if none is used."""
        named = {backup: kind for kind, backup in BACKENDS.items()}
        return named.get(self._region()[1], self._backend).encode()

    def set_memory_margin_bytes(self, value: int) -> None:
        """Set `TorchMemorySaver.memory_margin_bytes`."""
        memsaver.configure(margin_bytes=int(value))

    def _region(self) -> tuple[str, Backup]:
        """Return the tag and the backup policy of this thread's allocations."""
        name = _C.region_tag()
        return parts.split(name) if name is not None else ("default", "none")


class BinaryWrapper:
    """An object with the attribute `cdll`, through which frameworks access the state."""

    def __init__(self, state: ThreadState) -> None:
        self.cdll = state


class _Switch(threading.local):
    """The thread's current disabled section; None outside such sections."""

    off: contextlib.ExitStack | None = None
