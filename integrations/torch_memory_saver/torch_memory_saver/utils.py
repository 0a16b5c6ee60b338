"""Find the library to preload, and change environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memsaver._memory.preload import LIBRARY
from memsaver._runtime.native import LIBRARY_DIR
from memsaver.errors import ConfigError, NotLoadedError

__all__ = ["change_env", "get_binary_path_from_package", "is_xpu", "preload_library"]

_STEM = "torch_memory_saver_hook_mode_preload"


def preload_library() -> Path:
    """Return the path of the library for LD_PRELOAD, which is next to the package.

    Raises:
        NotLoadedError: the library is missing.
        ConfigError: `LD_PRELOAD` cannot contain the path, which has a space or a colon.
    """
    return _library(f"{_STEM}.abi3.so")


def get_binary_path_from_package(stem: str) -> Path:
    """Return the path of the library with this name, for programs that set LD_PRELOAD themselves.

    If torch is built for CUDA 12 or 13, the name of the returned library contains that version. The
    libraries are identical.

    Raises:
        ConfigError: the name is unknown, or `LD_PRELOAD` cannot contain the path.
        NotLoadedError: the library is not installed, or it would not find memsaver's library.
    """
    if stem != _STEM:
        raise ConfigError(f"memsaver has no library {stem!r}; it has {_STEM!r}")
    path = _library(f"{_STEM}{_cuda_suffix()}.abi3.so")
    if not (path.parent / "memsaver" / LIBRARY).is_file() and not _is_found_by_name():
        raise NotLoadedError(
            f"{path.name} would not find {LIBRARY}, which is in {LIBRARY_DIR}: install memsaver "
            f"and torch-memory-saver into the same folder (pip install without -e), put that "
            "folder into LD_LIBRARY_PATH, or start children in configure_subprocess()"
        )
    return path


def is_xpu() -> bool:
    """Return whether torch runs on Intel GPUs, which memsaver does not support."""
    return False


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """Set an environment variable during the block, and restore it afterwards."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def _library(name: str) -> Path:
    path = Path(__file__).resolve().parent.parent / name
    if not path.is_file():
        raise NotLoadedError(f"{path} is missing; reinstall memsaver's torch-memory-saver")
    if any(character in str(path) for character in " \t\n:"):
        raise ConfigError(
            f"LD_PRELOAD cannot name {str(path)!r}, because of the space or colon in it; install "
            "torch-memory-saver under another path"
        )
    return path


def _cuda_suffix() -> str:
    try:
        import torch
    except ImportError:
        return ""
    major = str(torch.version.cuda or "").split(".")[0]
    return f"_cu{major}" if major in ("12", "13") else ""


def _is_found_by_name() -> bool:
    """Return whether a child with this process's LD_LIBRARY_PATH finds memsaver's library."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":")
    return any((Path(folder) / LIBRARY).is_file() for folder in folders if folder)
