"""What SGLang sees as its memory saver."""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from typing import Any

import memsaver
from memsaver import parts
from memsaver.integrations.sglang import settings
from memsaver.native import Backup
from memsaver.reports import Report

__all__ = ["MemsaverAdapter"]

_logger = logging.getLogger("memsaver.sglang")


class MemsaverAdapter:
    """The interface of SGLang's `TorchMemorySaverAdapter`, of 0.5.16 and 0.5.23, over memsaver.

    SGLang makes one for each pool, graph runner and model runner; they hold nothing, as memsaver's
    state belongs to the process. Any thread, as `memsaver.region` says. Errors are memsaver's.
    """

    @property
    def enabled(self) -> bool:
        """True: it saves memory."""
        return True

    def check_validity(self, caller_name: str) -> None:
        """SGLang's own warns here of a saver that is not enabled; this one always is."""

    def configure_subprocess(self) -> AbstractContextManager[None]:
        """Around the start of a scheduler process: preload mode if asked for, else nothing.

        See `settings`. In preload mode it changes `os.environ` meanwhile, as `memsaver.preload`.
        """
        return memsaver.preload() if settings.is_preloading() else contextlib.nullcontext()

    def region(self, tag: str, enable_cpu_backup: bool = False) -> memsaver.region:
        """Put tensors made inside into `tag`; with `enable_cpu_backup` they keep their contents.

        See `memsaver.region`. Regions of one tag may have different policies, which become parts of
        the tag (`memsaver.parts`): a draft model may keep its weights while the main model does
        not.
        """
        backup = _backup(enable_cpu_backup)
        return memsaver.region(parts.name_of(tag, backup), backup=backup)

    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = "cuda_graph",
        enable_cpu_backup: bool = False,
    ) -> AbstractContextManager[None]:
        """`torch.cuda.graph` whose memory belongs to `tag`; see `memsaver.graph`."""
        backup = _backup(enable_cpu_backup)
        return memsaver.graph(
            cuda_graph,
            tag=parts.name_of(tag, backup),
            backup=backup,
            pool=pool,
            stream=stream,
            capture_error_mode=capture_error_mode,
        )

    def disable(self) -> AbstractContextManager[object]:
        """Tensors made inside belong to no tag."""
        return memsaver.disabled()

    def pause(self, tag: str) -> Report | None:
        """Give the memory of `tag` back; None, and nothing done, where no region ever named it."""
        names = parts.names_of(tag)
        if not names:
            _logger.debug("nothing to pause: no region and no graph of tag %r was made", tag)
            return None
        return memsaver.pause(*names)

    def resume(self, tag: str) -> Report | None:
        """Bring the memory of `tag` back; None as in `pause`."""
        names = parts.names_of(tag)
        if not names:
            _logger.debug("nothing to resume: no region and no graph of tag %r was made", tag)
            return None
        return memsaver.resume(*names)


def _backup(keep: bool) -> Backup:
    return Backup.HOST if keep else Backup.NONE
