"""`MemsaverAdapter`: memsaver as SGLang's memory saver."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import memsaver
from memsaver._memory.regions import lean_region
from memsaver._runtime.native import Backup
from memsaver._transitions import parts
from memsaver._transitions.reports import Report

from . import draft_weights, graph_pools, settings

__all__ = ["MemsaverAdapter"]

_logger = logging.getLogger("memsaver.sglang")


class MemsaverAdapter:
    """Implements the `TorchMemorySaverAdapter` of SGLang 0.5.16 and 0.5.23 with memsaver.

    SGLang creates an adapter for each pool, graph runner and model runner. Adapters have no state,
    because memsaver's state belongs to the process. Threads: see `memsaver.region`. Raises
    memsaver's errors.
    """

    @property
    def enabled(self) -> bool:
        """Return True, because this saver is always enabled."""
        return True

    def check_validity(self, caller_name: str) -> None:
        """Do nothing; SGLang's own method warns if a saver is not enabled."""

    def configure_subprocess(self) -> AbstractContextManager[None]:
        """Return a context manager in which SGLang starts a scheduler process.

        The process starts in preload mode if `settings` requests it.

        Preload mode changes `os.environ` during the block; see `memsaver.preload`.
        """
        return memsaver.preload() if settings.is_preloading() else contextlib.nullcontext()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> memsaver.region:
        """Allocate tensors created during the block in `tag`, with a backup if requested.

        See `memsaver.region`. Regions of one tag may have different policies, and the regions
        with the same policy form a part of the tag (`memsaver._transitions.parts`): a draft model's
        weights always have a backup, but the main model's weights only on request
        (`draft_weights`).

        The region does not initialize cuBLAS, because SGLang derives the size of its KV cache from
        the memory that is free before its first matrix product, and runs no model while a tag is
        paused. If a model computes while it is being loaded, cuBLAS's workspace is in `tag`.
        """
        tag, keep = draft_weights.placed(tag, enable_cpu_backup)
        backup = _backup(keep)
        return lean_region(parts.name_of(tag, backup), backup=backup)

    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "cuda_graph",
        enable_cpu_backup: bool = False,
    ) -> AbstractContextManager[None]:
        """Capture a graph with its memory in `tag`; see `memsaver.graph` and `graph_pools`."""
        backup = _backup(enable_cpu_backup)
        capture = memsaver.graph(
            cuda_graph,
            tag=parts.name_of(tag, backup),
            backup=backup,
            pool=pool,
            stream=stream,
            capture_error_mode=capture_error_mode,
        )
        return _captured(capture)

    def disable(self) -> AbstractContextManager[object]:
        """Allocate tensors created during the block outside all tags."""
        return memsaver.disabled()

    def pause(self, tag: str) -> Report | None:
        """Release the memory of `tag`.

        Does nothing and returns None if no region uses the tag.
        """
        names = parts.names_of(tag)
        if not names:
            _logger.debug("nothing to pause: tag %r has no region and no graph", tag)
            return None
        return memsaver.pause(*names)

    def resume(self, tag: str) -> Report | None:
        """Map the memory of `tag` again. Returns None if no region uses the tag."""
        names = parts.names_of(tag)
        if not names:
            _logger.debug("nothing to resume: tag %r has no region and no graph", tag)
            return None
        return memsaver.resume(*names)


@contextlib.contextmanager
def _captured(capture: AbstractContextManager[tuple[int, int]]) -> Iterator[None]:
    with capture as pool, graph_pools.named(pool):
        yield


def _backup(keep: bool) -> Backup:
    return settings.backup() if keep else "none"
