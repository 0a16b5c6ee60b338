"""Select backup policies from regions' options, and release backups after a resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import memsaver
from memsaver._runtime.native import _C, STATES, Backup
from memsaver._transitions import parts
from memsaver.errors import ConfigError, InvalidStateError, UnknownTagError

__all__ = ["BACKENDS", "Backups", "CpuBackupBackend", "backup_for"]

CpuBackupBackend: TypeAlias = Literal["mmap", "pinned"]

BACKENDS: dict[str, Backup] = {"pinned": "host", "mmap": "pageable"}
"""memsaver's backup policy for each kind of host memory."""


def backup_for(
    enable_cpu_backup: bool,
    enable_disk_backup: bool,
    cpu_backup_backend: str | None,
    default_backend: str,
) -> Backup:
    """Return memsaver's backup policy for a region's options.

    Raises:
        ConfigError: the options are inconsistent, or the kind of host memory is unknown.
    """
    if enable_cpu_backup and enable_disk_backup:
        raise ConfigError("enable_cpu_backup and enable_disk_backup exclude each other: choose one")
    if cpu_backup_backend is not None and not enable_cpu_backup:
        raise ConfigError("cpu_backup_backend needs enable_cpu_backup=True")
    if enable_disk_backup:
        return "disk"
    if not enable_cpu_backup:
        return "none"
    backend = default_backend if cpu_backup_backend is None else cpu_backup_backend
    if backend not in BACKENDS:
        raise ConfigError(f"cpu_backup_backend {backend!r} is not one of {', '.join(BACKENDS)}")
    return BACKENDS[backend]


class Backups:
    """The host memory of backups between a resume and the next pause.

    Any thread may use this object.

    Attributes:
        retain: whether the memory is kept with its contents; None if no value has been set.
    """

    def __init__(self, retain: bool | None) -> None:
        self.retain = retain
        # Names of tags whose last resume retained their backups. Needs no lock: it records only the
        # program's request, and memsaver decides whether a copy exists.
        self._retained: set[str] = set()

    def resumed(self, names: Sequence[str]) -> None:
        """Keep or release the backups of resumed tags."""
        if self.retain:
            self._retained.update(names)
            return
        self._retained.difference_update(names)
        released = [name for name in names if self.retain is False or _is_pageable(name)]
        if released:
            memsaver.trim(wait=True, tags=released)

    def view(self, tensor: Any, writable: bool) -> Any:
        """Return the backup of a tensor as a CPU tensor; None if there is no backup.

        Raises:
            InvalidStateError: the tensor's tag is paused, and has no backup or a backup on disk.
        """
        found = _C.locate(tensor.data_ptr()) if tensor.numel() > 0 else None
        if tensor.numel() > 0 and found is None:  # in no region
            return None
        if found is None or STATES[found[2]] in ("paused", "saving"):
            return memsaver.backup_view(tensor, writable=writable)
        if found[0] not in self._retained:
            return None
        try:
            return memsaver.backup_view(tensor, writable=writable, retained=True)
        except InvalidStateError:  # the tensor was not saved, or the copy was released
            return None


def _is_pageable(name: str) -> bool:
    try:
        return parts.split(name)[1] == "pageable"
    except UnknownTagError:
        return False
