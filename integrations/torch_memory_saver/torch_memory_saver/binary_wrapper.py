"""What frameworks reach for underneath the public interface: the state of the calling thread.

They turn the catching of allocations off around a library that makes buffers of its own:
`torch_memory_saver._impl._binary_wrapper.cdll.tms_set_interesting_region(False)`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import memsaver
from memsaver.native import _C, backup_of
from torch_memory_saver.backups import BACKENDS
from torch_memory_saver.tags import Member, Tags

__all__ = ["BinaryWrapper", "ThreadState"]


class ThreadState:
    """The calling thread's state, under the names that the library's functions have."""

    def __init__(self, tags: Tags, backend: str) -> None:
        self._tags = tags
        self._backend = backend
        self._local = _Switch()

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """What is switched off inside the block is switched on again at its end, and not before."""
        around, self._local.off = self._local.off, None
        try:
            yield
        finally:
            self.tms_set_interesting_region(True)
            self._local.off = around

    def tms_get_interesting_region(self) -> bool:
        """Whether what this thread allocates now belongs to a tag."""
        return _C.region_tag() is not None

    def tms_set_interesting_region(self, interesting: bool) -> None:
        """Switch the thread's innermost region off, or on again; outside any, nothing happens."""
        if interesting:
            off, self._local.off = self._local.off, None
            if off is not None:
                off.close()
        elif self._local.off is None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(memsaver.disabled())
                self._local.off = stack.pop_all()

    def tms_get_current_tag(self) -> bytes:
        """The tag of what this thread allocates now."""
        member = self._member()
        return (member.tag if member else "default").encode()

    def tms_get_enable_cpu_backup(self) -> bool:
        """Whether that has a backup in host memory."""
        member = self._member()
        return member is not None and member.backup in BACKENDS.values()

    def tms_get_enable_disk_backup(self) -> bool:
        """Whether that has a backup on disk."""
        member = self._member()
        return member is not None and member.backup == "disk"

    def tms_get_cpu_backup_backend(self) -> bytes:
        """The kind of host memory of its backup, or of one that would be asked for."""
        member = self._member()
        named = {backup: kind for kind, backup in BACKENDS.items()}
        return (named.get(member.backup, self._backend) if member else self._backend).encode()

    def set_memory_margin_bytes(self, value: int) -> None:
        """`TorchMemorySaver.memory_margin_bytes`."""
        memsaver.configure(margin_bytes=int(value))

    def _member(self) -> Member | None:
        name = _C.region_tag()
        if name is None:
            return None
        return self._tags.find(name) or Member(name, name, backup_of(_C.tag_backup(name)))


class BinaryWrapper:
    """Holds the state as `cdll`, where frameworks look for it."""

    def __init__(self, state: ThreadState) -> None:
        self.cdll = state


class _Switch(threading.local):
    """What ends the disabled section that the thread has switched on, if it has."""

    off: contextlib.ExitStack | None = None
