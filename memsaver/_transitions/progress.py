"""Progress of long calls: a bar on the terminal, or the caller's own callback."""

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
    """A bar with a title, bytes, rate and remaining time, for the duration of a `with` block.

    To update the bar, call it with the bytes done and the total bytes, on any thread. The bar is
    drawn on stderr and removed at the end of the block. Writes nothing if stderr is not a terminal.

    Args:
        title: a description of the work.
        console: the console to draw on, instead of stderr.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        figure = partial(Column, no_wrap=True)  # on a narrow terminal the title is wrapped
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
    """Return a column that shows the rate in binary units, like the sizes; rich's is decimal."""
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
    """Yield the callback for a `progress` argument, for a `with` block.

    Args:
        progress: True for a `ProgressBar`; a callable, which is yielded unchanged; False or None
            for no callback.
        title: the title of the bar.

    Raises:
        TypeError: `progress` is none of these.
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
