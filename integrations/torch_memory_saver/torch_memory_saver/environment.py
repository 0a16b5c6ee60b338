"""The environment variables of torch_memory_saver, which are read at the first use.

| variable | meaning |
|---|---|
| TMS_INIT_ENABLE | the whole process is a region with the tag "default"; it must be preloaded |
| TMS_INIT_ENABLE_CPU_BACKUP | that region has a backup in host memory |
| TMS_INIT_ENABLE_DISK_BACKUP | that region has a backup on disk |
| TMS_INIT_CPU_BACKUP_BACKEND | the default backend for regions: "pinned" or "mmap" |
| TMS_RETAIN_CPU_BACKUP | `TorchMemorySaver.retain_cpu_backup` |
| TMS_DISK_BACKUP_DIR | `TorchMemorySaver.set_disk_backup_dir` |
| TMS_DISK_BACKUP_CHUNK_MB | has no effect: memsaver chooses its own chunk size |

The preloaded library also reads the first four variables before Python starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from memsaver.errors import ConfigError
from torch_memory_saver.backups import BACKENDS

__all__ = ["Environment", "read_environment"]

_TRUE = ("1", "true", "TRUE", "yes", "YES")
_FALSE = ("0", "false", "FALSE", "no", "NO")


@dataclass(frozen=True)
class Environment:
    """The values of the variables.

    Attributes:
        whole_process: whether all allocations of the process belong to a tag.
        backend: the kind of host memory for regions that do not specify one.
        retain: None if the variable is not set.
        disk_dir: None if the variable is not set.
    """

    whole_process: bool
    backend: str
    retain: bool | None
    disk_dir: str | None


def read_environment() -> Environment:
    """Return the current values of the variables in this process.

    Raises:
        ConfigError: a variable has an invalid value, or two variables are inconsistent.
    """
    env = os.environ
    backend = env.get("TMS_INIT_CPU_BACKUP_BACKEND", "pinned")
    if backend not in BACKENDS:
        raise ConfigError(
            f"TMS_INIT_CPU_BACKUP_BACKEND must be one of {', '.join(BACKENDS)}, not {backend!r}"
        )
    cpu = _flag(env, "TMS_INIT_ENABLE_CPU_BACKUP")
    disk = _flag(env, "TMS_INIT_ENABLE_DISK_BACKUP")
    if cpu and disk:
        raise ConfigError(
            "TMS_INIT_ENABLE_CPU_BACKUP and TMS_INIT_ENABLE_DISK_BACKUP are both set: choose one"
        )
    return Environment(
        whole_process=_flag(env, "TMS_INIT_ENABLE") or False,
        backend=backend,
        retain=_flag(env, "TMS_RETAIN_CPU_BACKUP"),
        disk_dir=env.get("TMS_DISK_BACKUP_DIR") or None,
    )


def _flag(env: Mapping[str, str], name: str) -> bool | None:
    text = env.get(name)
    if text is None:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ConfigError(f"{name} must be one of {', '.join(_TRUE + _FALSE)}, not {text!r}")
