"""Preload mode: child processes in which memsaver serves cudaMalloc.

Regions (`memsaver.region`) do not need it. Preload mode is for code that cannot be put into a
region, such as a whole trainer. A running process cannot be preloaded, so all functions apply to
children: `memsaver run -- command` in a shell, `preload()` around the start of processes,
`preload_env()` for an explicit environment.

The preloaded library intercepts cudaMalloc, cudaMallocAsync and their counterparts, if the caller
is linked to the CUDA runtime dynamically (torch, its extensions, most wheels). Code with a
statically linked runtime calls the driver, and runs as if memsaver were absent.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from memsaver._runtime.blocks import block
from memsaver._runtime.native import Backup, backup_code, check_new_tag
from memsaver.errors import ConfigError, NotLoadedError

__all__ = ["is_preloaded", "preload", "preload_env"]

LIBRARY = "libmemsaver_preload.so"
CORE = "libmemsaver.so"

# The older name is still read if the newer one is not set.
_TORCH_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"(\bexpandable_segments\s*:\s*)True\b", re.IGNORECASE)
_SEPARATORS = re.compile(r"[:\s]+")


def preload_env(
    tag: str | None = None,
    backup: Backup | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment variables that preload memsaver into a child process.

    Args:
        tag: all memory that the child allocates outside `memsaver.disabled()` belongs to this tag,
            as if the whole process were a region. None keeps the value in `env`, if any; without a
            tag, the child enters its own regions.
        backup: the tag's policy, "none", "host", "pageable", "disk" or "peer" (see
            `memsaver.region`). None keeps the value in `env`; if there is none, a pause discards
            the contents.
        env: the base of the child's environment, by default this process's. It is not changed.

    Returns:
        Only the variables to set. `LD_PRELOAD` keeps its libraries; memsaver's library is added in
        front unless it is present. Another installation's library is removed, because a process can
        have only one. `MEMSAVER_TAG` and `MEMSAVER_BACKUP` are included if given. With a tag for
        the whole process, torch's expandable segments would allocate from the driver,
        where no hook applies: if `PYTORCH_ALLOC_CONF` or `PYTORCH_CUDA_ALLOC_CONF` contains
        `expandable_segments:True`, it becomes `False`. Settings in the child's own code are not
        changed. (Torch mode works with expandable segments.)

    Raises:
        ConfigError: the tag is empty, the backup is unknown or has no tag, or the installation path
            has a space or a colon, which `LD_PRELOAD` cannot express.
        NotLoadedError: the libraries are not installed.
    """
    base = os.environ if env is None else env
    added: dict[str, str] = {}
    if tag is not None:
        added["MEMSAVER_TAG"] = check_new_tag(tag)
    whole_process = bool(tag or base.get("MEMSAVER_TAG"))
    if backup is not None:
        backup_code(backup)
        if not whole_process:
            raise ConfigError(
                f"backup {backup!r} needs a tag for the whole process; pass one, or set the backup "
                "on the process's regions"
            )
        added["MEMSAVER_BACKUP"] = backup
    inherited = base.get("MEMSAVER_BACKUP", "")
    if backup is None and whole_process and inherited:
        try:
            backup_code(inherited)
        except ConfigError as error:
            raise ConfigError(f"MEMSAVER_BACKUP is set, and {error}") from None
    added["LD_PRELOAD"] = _with_library(base.get("LD_PRELOAD", ""), _library_path())
    if whole_process:
        for name in _TORCH_SETTINGS:
            changed, count = _EXPANDABLE.subn(r"\g<1>False", base.get(name, ""))
            if count:
                added[name] = changed
    return added


@block
def preload(tag: str | None = None, backup: Backup | None = None) -> Iterator[None]:
    """Preload children that are started inside the block; the arguments are those of `preload_env`.

    Use it if no environment is passed to the function that starts a process: multiprocessing with
    the "spawn" method, subprocess, os.posix_spawn. Forked children share this process's libraries
    and are not preloaded; neither are the children of a running fork server.

    The block changes `os.environ` for the whole process, so children that other threads start
    during the block are preloaded too. At its end the block restores the variables that it set,
    even after an exception. Blocks may be nested.

    Raises:
        ConfigError, NotLoadedError: see `preload_env`; no variable has been changed.
    """
    added = preload_env(tag, backup)
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def is_preloaded() -> bool:
    """Return whether this process's own CUDA allocations go through memsaver's hooks."""
    try:
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _library_path() -> str:
    folder = Path(__file__).resolve().parent.parent  # memsaver's folder, with its libraries
    # The dynamic linker ignores a preloaded library that it cannot find, but ends every process,
    # the shell included, if a library that this library needs is missing.
    missing = [name for name in (LIBRARY, CORE) if not (folder / name).is_file()]
    if missing:
        raise NotLoadedError(
            f"{' and '.join(missing)} not found in {folder}; reinstall memsaver (from a source "
            "checkout: pip install -e .)"
        )
    path = str(folder / LIBRARY)
    if _SEPARATORS.search(path):
        raise ConfigError(
            f"LD_PRELOAD cannot name {path!r}, because of the space or colon in it; install "
            "memsaver under another path"
        )
    return path


def _with_library(preloaded: str, path: str) -> str:
    """Return `LD_PRELOAD` with the library in front, unless it already contains the library.

    Removes another installation's library: of two libraries, only the first would take effect.
    """
    present = [entry for entry in _SEPARATORS.split(preloaded) if entry]
    ours = {os.path.realpath(path), os.path.realpath(os.path.join(os.path.dirname(path), CORE))}
    kept = [
        entry
        for entry in present
        if os.path.basename(entry) not in (LIBRARY, CORE) or os.path.realpath(entry) in ours
    ]
    if not any(os.path.realpath(entry) == os.path.realpath(path) for entry in kept):
        kept.insert(0, path)
    return preloaded if kept == present else ":".join(kept)
