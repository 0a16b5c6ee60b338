"""Preload mode: child processes in which memsaver handles cudaMalloc.

Preload mode is for code that cannot run in a region, such as a whole trainer. Regions
(`memsaver.region`) do not need preload mode. The library cannot be preloaded into a running
process, only into new child processes. To start a child with the library, use the command
`memsaver run -- COMMAND`, `preload()` around the code that starts processes, or `preload_env()` for
an explicit environment.

The preloaded library intercepts cudaMalloc, cudaMallocAsync and related functions. It intercepts
only callers that link the CUDA runtime dynamically, such as torch, its extensions and most wheels.
Code with a statically linked runtime calls the driver directly, so memsaver does not affect it.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

from memsaver._runtime.blocks import block
from memsaver._runtime.native import _C, Backup, backup_code, check_new_tag
from memsaver._runtime.settings import Options
from memsaver._runtime.variables import variable_of
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
        tag: a process-wide tag. All memory that the child allocates outside `memsaver.disabled()`
            belongs to this tag, as if the whole process were a region. None keeps the value in
            `env`, if any. Without a process-wide tag, only regions of the child use memsaver.
        backup: the tag's policy, "none", "host", "pageable", "disk" or "peer" (see
            `memsaver.region`). None keeps the value in `env`. If `env` has no value, each pause of
            256 MiB or more must pass a backup, and smaller pauses discard the contents by default.
        env: the base of the child's environment; by default, this process's environment. The
            mapping is not changed.

    Returns:
        The variables to set, and no others. `LD_PRELOAD` keeps its libraries, and memsaver's
        library is added at the front unless already present. The library of another memsaver
        installation is removed, because a process can have only one. The result contains
        `MEMSAVER_TAG` and `MEMSAVER_BACKUP` if `tag` and `backup` are passed. With a process-wide
        tag, torch must not use expandable segments, because they allocate directly from the driver,
        without memsaver's hooks. Therefore, `expandable_segments:True` in `PYTORCH_ALLOC_CONF` or
        `PYTORCH_CUDA_ALLOC_CONF` becomes `expandable_segments:False`. Settings in the child's own
        code are not changed. Without preload mode, torch may use expandable segments.

    Raises:
        ConfigError: the tag is empty, the backup is unknown or is passed without a tag, the
            variable of an option other than `disk_dir` has an invalid value, or the installation
            path has a space or a colon, which `LD_PRELOAD` cannot express.
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
    _check_options(base)
    added["LD_PRELOAD"] = _with_library(base.get("LD_PRELOAD", ""), _library_path())
    if whole_process:
        for name in _TORCH_SETTINGS:
            changed, count = _EXPANDABLE.subn(r"\g<1>False", base.get(name, ""))
            if count:
                added[name] = changed
    return added


@block
def preload(tag: str | None = None, backup: Backup | None = None) -> Iterator[None]:
    """Preload memsaver into child processes that are started inside the block.

    The arguments are the same as for `preload_env`. Use this function if the children inherit this
    process's environment, for example with multiprocessing's "spawn" method or with subprocess.
    Forked children are not preloaded, because they share this process's libraries. Children of a
    fork server that is already running are not preloaded either.

    The block changes `os.environ` for the whole process, so children that other threads start
    during the block are also preloaded. The changed variables are restored at the end of the block,
    even after an exception. Blocks may be nested, but blocks in different threads must not overlap.

    Raises:
        ConfigError, NotLoadedError: see `preload_env`. After an error, all variables are unchanged.
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
    """Return whether memsaver's hooks intercept the CUDA allocations of this process."""
    try:
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _check_options(environment: Mapping[str, str]) -> None:
    for option in fields(Options):
        value = environment.get(variable_of(option.name))
        # disk_dir is not checked: a child may start in another folder, or see other directories.
        if value is not None and option.name != "disk_dir":
            _C.check_option(option.name, os.fsencode(value))


def _library_path() -> str:
    folder = Path(__file__).resolve().parent.parent  # memsaver's folder, with its libraries
    # The dynamic linker ignores a preloaded library that it cannot find, but terminates every
    # process, including the shell, if a library that the preloaded library needs is missing.
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
    """Return a value for `LD_PRELOAD` that contains the library, at the front unless already
    present.

    The library of another memsaver installation is removed, because only the first of two libraries
    would take effect.
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
