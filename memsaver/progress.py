"""Progress of long calls: a bar on the terminal, or the caller's own callback."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich takes long to import, and few calls want a bar
    from rich.console import Console

__all__ = ["Callback", "ProgressBar", "callback_of"]

Callback = Callable[[int, int], object]
"""Takes the bytes done and the bytes in total."""


class ProgressBar:
    """A bar with a title, bytes, rate and remaining time, for the length of a `with` block.

    Calling it with the bytes done and the bytes in total moves it; any thread may. It appears on
    stderr and vanishes at the end of the block; where stderr is no terminal, nothing is written.

    Args:
        title: what is under way.
        console: where to draw, instead of on stderr.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        from rich import progress
        from rich.console import Console

        console = console or Console(stderr=True)
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (console.is_terminal or console.is_jupyter),
        )
        self._task = self._progress.add_task(title, total=None)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show that `done_bytes` of `total_bytes` are done."""
        self._progress.update(self._task, completed=done_bytes, total=total_bytes)


def callback_of(
    progress: bool | Callback | None, title: str
) -> contextlib.AbstractContextManager[Callback | None]:
    """The callback that a `progress` argument asks for, for the length of a `with` block.

    Args:
        progress: True for a `ProgressBar`, a callable for itself, False or None for none.
        title: what the bar says.

    Raises:
        TypeError: it is none of these.
    """
    if progress is True:
        return ProgressBar(title)
    if progress is None or progress is False:
        return contextlib.nullcontext(None)
    if callable(progress):
        return contextlib.nullcontext(progress)
    raise TypeError(
        f"progress is True, False, None or a function of two numbers of bytes, not {progress!r}"
    )
