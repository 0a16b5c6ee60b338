"""Format tables for narrow terminals, stacking columns and never truncating numbers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO, TypeAlias

if TYPE_CHECKING:  # imported by the commands themselves, because rich is slow to import
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "LEAST_WIDTH",
    "Groups",
    "add_columns",
    "folded",
    "groups_for",
    "is_narrow",
    "is_redrawable",
    "output_console",
    "simple_box",
]

Groups: TypeAlias = tuple[tuple[str, ...], ...]
"""The names of a table's values. The values of a group are stacked in one column."""

LEAST_WIDTH = 50  # columns that a folded table needs; with fewer, the terminal wraps the lines
_WIDTH = 80  # columns that a table with one line per row needs


def output_console() -> Console:
    """Return a console on stdout that is at least as wide as a folded table."""
    from rich.console import Console, ConsoleDimensions

    console = Console(highlight=False)
    columns, lines = console.size
    if console.is_dumb_terminal:  # streams whose size rich does not query
        columns, lines = shutil.get_terminal_size()
    console.size = ConsoleDimensions(max(columns, LEAST_WIDTH), lines)
    return console


def is_redrawable(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal on which lines can be redrawn."""
    if stream is None or not stream.isatty():
        return False
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def is_narrow(console: Console) -> bool:
    """Return whether tables must be folded."""
    return console.width < _WIDTH


def groups_for(console: Console, narrow: Groups) -> Groups:
    """Return the groups for this console. A wide console has a column for every value."""
    return narrow if is_narrow(console) else tuple((name,) for group in narrow for name in group)


def add_columns(table: Table, groups: Groups, least: int, left: tuple[str, ...] = ()) -> None:
    """Add a column for each group of names. Text in the first column is wrapped. The other columns
    are never truncated.

    Args:
        table: the table, without columns.
        groups: the names of the values in each column.
        least: the minimum width of the first column.
        left: the first names of the groups whose columns are left-aligned.
    """
    for names in groups:
        title = "\n".join(names)
        if names is groups[0]:
            table.add_column(title, overflow="fold", min_width=least)
        else:
            table.add_column(title, justify="left" if names[0] in left else "right", no_wrap=True)


def folded(groups: Groups, cells: Mapping[str, Text | str]) -> list[Text]:
    """Return the cell of each group in one row. Missing values are empty."""
    from rich.text import Text

    stacks = []
    for names in groups:
        stack = Text("\n").join(
            cell if isinstance(cell, Text) else Text(cell)
            for cell in (cells.get(name, "") for name in names)
        )
        stack.rstrip()
        stacks.append(stack)
    return stacks


def simple_box(console: Console) -> Box:
    """Return the box style of tables, which has only a line below the header."""
    import rich.box

    return rich.box.ASCII2 if console.options.ascii_only else rich.box.SIMPLE_HEAD
