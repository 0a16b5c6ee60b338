"""Ctrl-C at a time when leaving would lose something, or let others wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

__all__ = ["interrupts_deferred"]

Handler = Callable[[int, FrameType | None], object]


class interrupts_deferred:
    """SIGINT's handler is called at the end of the block instead of within. May be nested.

    Concerns the main thread, which is the one that Python calls handlers on. An interrupt on the
    way into the block is raised there: where the block must be done all the same (leaving what was
    entered, say), catch it and do the block if it was not begun.
    """

    def __init__(self) -> None:
        self._handler: Handler | None = None  # what is called at the end; None: nothing is deferred
        self._came: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if threading.get_ident() == threading.main_thread().ident and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                self._handler(*self._came[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, frame))
