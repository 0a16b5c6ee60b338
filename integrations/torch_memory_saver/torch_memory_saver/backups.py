"""What the options of a region mean to memsaver."""

from __future__ import annotations

from typing import Literal, TypeAlias

from memsaver.errors import ConfigError

__all__ = ["BACKENDS", "CpuBackupBackend", "backup_for"]

CpuBackupBackend: TypeAlias = Literal["mmap", "pinned"]

BACKENDS = {"pinned": "host", "mmap": "pageable"}
"""memsaver's backup for each kind of host memory."""


def backup_for(
    enable_cpu_backup: bool,
    enable_disk_backup: bool,
    cpu_backup_backend: str | None,
    default_backend: str,
) -> str:
    """The backup that a region asks for, by the name that memsaver has for it.

    Raises:
        ConfigError: the options contradict each other, or there is no such kind of host memory.
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
