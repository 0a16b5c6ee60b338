"""Preload mode: child processes whose cudaMalloc is memsaver's.

Torch mode, with `memsaver.region`, needs none of this. Preload mode is for code that cannot be put
into a region, a whole trainer say. A process cannot be preloaded once it runs, so everything here
concerns children: `memsaver run -- command` in a shell, `preload()` around a start, `preload_env()`
for an explicit environment.

What is served: cudaMalloc, cudaMallocAsync and their counterparts, called by a library that is
linked to the CUDA runtime dynamically (torch, its extensions, most wheels). What is not: code with
the runtime linked in statically, which calls the driver underneath; it runs as without memsaver.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from memsaver.blocks import block
from memsaver.errors import ConfigError, NotLoadedError
from memsaver.native import backup_code, check_new_tag

__all__ = ["is_preloaded", "preload", "preload_env"]

LIBRARY = "libmemsaver_preload.so"
CORE = "libmemsaver.so"

# The older name is still read where the newer one is not set.
_TORCH_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"(\bexpandable_segments\s*:\s*)True\b", re.IGNORECASE)
_SEPARATORS = re.compile(r"[:\s]+")


def preload_env(
    tag: str | None = None,
    backup: str | None = None,
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The variables to add to a child's environment, so that it is preloaded.

    Args:
        tag: Everything the child allocates outside of `memsaver.disabled()` belongs to this tag,
            as if the whole process were a region. None leaves what `env` says, usually nothing:
            the child then enters regions of its own.
        backup: The tag's policy, "none", "host", "pageable" or "disk" (see `memsaver.region`). None
            leaves what `env` says; without that the contents are discarded by a pause.
        env: What the child's environment starts from, by default this process's. It is only read.

    Returns:
        Only what has to be set. `LD_PRELOAD` keeps every library that is in it already, and
        memsaver's comes first unless it is there; another installation's is left out, as a process
        can have one only. `MEMSAVER_TAG` and `MEMSAVER_BACKUP` are there
        if given. With a tag for the whole process, torch's expandable segments would take their
        memory from the driver, where no hook sees it: `PYTORCH_ALLOC_CONF` and
        `PYTORCH_CUDA_ALLOC_CONF`, where they ask for `expandable_segments:True`, ask for `False`
        instead. Settings made in the child's own code are not seen here. (Torch mode works with
        expandable segments.)

    Raises:
        ConfigError: an empty tag, an unknown backup, a backup without any tag, or an installation
            path that `LD_PRELOAD` cannot express (a space or a colon).
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
                f"backup {backup!r} needs a tag for the process; give one, or choose the backup "
                "where the process enters its regions"
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
def preload(tag: str | None = None, backup: str | None = None) -> Iterator[None]:
    """Children started inside the block are preloaded; the arguments are those of `preload_env`.

    For starters that take no environment: multiprocessing with the "spawn" method, subprocess,
    os.posix_spawn. Forked children share this process's libraries and are not preloaded, nor are
    the children of a fork server that runs already.

    The block changes `os.environ`, which belongs to the whole process: children that other threads
    start meanwhile are preloaded too. The variables it set are put back at its end, also when it
    raises; blocks may be nested.

    Raises:
        ConfigError, NotLoadedError: as `preload_env`, before anything has changed.
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
    """Whether this process's own CUDA allocations go through memsaver's hooks."""
    try:
        ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    return True


def _library_path() -> str:
    folder = Path(__file__).resolve().parent
    # The dynamic linker ignores a preloaded library that it cannot find, but ends every process,
    # the shell included, if one that this library needs is missing.
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
    """`LD_PRELOAD` with the library in front, unless it is in it anywhere.

    Another installation's is left out: of two, the first would be the process's only one.
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
