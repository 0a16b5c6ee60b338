"""Children whose cudaMalloc is memsaver's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import memsaver
from torch_memory_saver.utils import change_env, preload_library

__all__ = ["configure_subprocess"]


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Children started inside the block are preloaded.

    A child with TMS_INIT_ENABLE=1 in its environment is one region then, with the tag "default".
    The block changes `os.environ`, which belongs to the whole process, and puts it back.

    Raises:
        NotLoadedError: a library is not there.
        ConfigError: it lies where `LD_PRELOAD` cannot name it.
    """
    # memsaver's own library as well, which the other one need not look for then.
    others = memsaver.preload_env()["LD_PRELOAD"].split(":")
    ours = str(preload_library())
    preloaded = [ours, *(path for path in others if path != ours)]
    with change_env("LD_PRELOAD", ":".join(preloaded)):
        yield
