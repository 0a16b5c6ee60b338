"""Start child processes that use memsaver's cudaMalloc."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import memsaver
from torch_memory_saver.hooks.base import HookUtilModePreload
from torch_memory_saver.utils import change_env, preload_library

__all__ = ["HookUtilModePreload", "configure_subprocess"]


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Preload memsaver into all child processes started during the block.

    If TMS_INIT_ENABLE=1 is set, the whole preloaded child process is one region with the tag
    "default". During the block, `os.environ` is changed for all threads; it is restored when the
    block ends.

    Raises:
        NotLoadedError: a library is missing.
        ConfigError: a library's path contains a space or a colon, which `LD_PRELOAD` does not
            support.
    """
    # Include memsaver's own library, so that this package's library need not search for it.
    others = memsaver.preload_env()["LD_PRELOAD"].split(":")
    ours = str(preload_library())
    preloaded = [ours, *(path for path in others if path != ours)]
    with change_env("LD_PRELOAD", ":".join(preloaded)):
        yield
