"""Progress of long calls: a progress bar on the terminal, or a callback from the caller."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # rich is slow to import, and few calls need a bar
    from rich.console import Console
    from rich.progress import ProgressColumn
    from rich.table import Column

__all__ = ["Callback", "ProgressBar", "callback_of"]

Callback = Callable[[int, int], object]
"""A function that receives the number of bytes done and the total number of bytes."""


class ProgressBar:
    """A progress bar with a title, bytes, rate and remaining time, shown during a `with` block.

    To update the bar, call the object with the bytes done and the total bytes, on any thread. The
    bar is drawn on stderr, and is removed at the end of the block. If stderr is not a terminal,
    nothing is drawn.

    Args:
        title: a description of the work.
        console: the console to use instead of stderr.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        figure = partial(Column, no_wrap=True)  # on a narrow terminal, the title is wrapped
        console = console or Console(stderr=True)
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}", markup=False, table_column=Column()),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True, table_column=figure()),
            _rate_column(figure()),
            progress.TimeRemainingColumn(table_column=figure()),
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
        """Update the bar to `done_bytes` of `total_bytes`."""
        self._progress.update(self._task, completed=done_bytes, total=total_bytes)


def _rate_column(column: Column) -> ProgressColumn:
    """Return a column with the rate in binary units; rich's own column uses decimal units."""
    from rich import filesize
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            if rate is None:
                return Text("?", style="progress.data.speed")
            names = ["bytes/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s"]
            unit, name = filesize.pick_unit_and_suffix(int(rate), names, 1024)
            return Text(f"{rate / unit:,.1f} {name}", style="progress.data.speed")

    return RateColumn(table_column=column)


def callback_of(
    progress: bool | Callback | None, title: str
) -> contextlib.AbstractContextManager[Callback | None]:
    """Create a context manager that yields the callback for a `progress` argument.

    Args:
        progress: the argument: True yields a `ProgressBar`, a callable is yielded unchanged, and
            False or None yields None.
        title: the title of the bar.

    Raises:
        TypeError: `progress` has any other value.
    """
    if progress is True:
        return ProgressBar(title)
    if progress is None or progress is False:
        return contextlib.nullcontext(None)
    if callable(progress):
        return contextlib.nullcontext(progress)
    raise TypeError(
        "progress must be True, False, None or a function of two numbers of bytes, not "
        f"{progress!r}"
    )
