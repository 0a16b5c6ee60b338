"""`memsaver bench`: measure the bus, the driver and memsaver."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memsaver
from memsaver._runtime.text import size_text
from memsaver.cli.failures import FAILURE, USAGE, fail
from memsaver.cli.sizes import gibibytes, parse_bytes
from memsaver.cli.tables import (
    Groups,
    add_columns,
    folded,
    is_narrow,
    is_redrawable,
    output_console,
    simple_box,
)
from memsaver.errors import ConfigError, MemsaverError

if TYPE_CHECKING:  # imported by the command itself: other commands do not need them
    from rich.console import Console
    from rich.table import Table

    from memsaver.cli.measurements import Measured

__all__ = ["command"]

_fail = partial(fail, "memsaver bench")

SCHEMA = 1  # incremented when a key of the JSON changes its meaning or is removed

_WIDE: Groups = (("",), ("ms",), ("GiB/s",), ("limit",), (" ms",), ("of limit",))
_NARROW: Groups = (("",), ("ms", "GiB/s"), ("limit ms", "of limit"))

SIMULATED = "On the simulated driver, times depend on this CPU and do not predict a GPU's speed."


def command(
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="The size of the test memory, such as 16GiB. By default up to 16 GiB, depending "
            "on the free memory of the device and the host.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        int, typer.Option("--device", min=0, metavar="INDEX", help="The device's index.")
    ] = 0,
    rounds: Annotated[
        int,
        typer.Option("--rounds", min=1, max=1000, metavar="N", help="The number of repetitions."),
    ] = 5,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the results as JSON, including the time of every round."
        ),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Also draw a picture (.png, .svg or .pdf); needs matplotlib (the extra `plot`).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure this machine's bus and driver, and compare memsaver's pauses and resumes with them.

    The measurement takes half a minute and allocates device and host memory, so run nothing else at
    the same time. The command checks the contents after every resume. Needs no torch.
    """
    from memsaver.cli.measurements import measure_machine

    try:
        wanted = parse_bytes(size) if size is not None else None
    except ValueError as error:
        _fail(f"--size: {error}", USAGE)
    if picture is not None:
        _check_picture(picture)
    try:
        with _status() as telling:
            measured = measure_machine(wanted, rounds, device, telling)
    except MemsaverError as error:
        _fail(str(error), USAGE if isinstance(error, ConfigError) else FAILURE)
    if as_json:
        typer.echo(json.dumps(document(measured), indent=2))
    else:
        draw(output_console(), measured)
    if picture is not None:
        from memsaver._runtime.whole_files import replace_file
        from memsaver.cli.measurements.picture import draw_picture

        try:
            replace_file(picture, draw_picture(measured, picture.suffix[1:].lower()))
        except OSError as error:
            _fail(f"the picture could not be written: {error}", FAILURE)
        if not as_json:
            typer.echo(f"picture: {picture}")


def document(measured: Measured) -> dict[str, Any]:
    """Return the results as a JSON document: sizes in bytes, times in seconds."""
    rows = [
        {
            **dataclasses.asdict(figure),
            "median_seconds": figure.median_seconds,
            "bytes_per_second": figure.bytes_per_second,
            "of_limit_percent": figure.of_limit_percent,
        }
        for figure in measured.figures
    ]
    return {
        "schema": SCHEMA,
        "memsaver": memsaver.__version__,
        "device": measured.device,
        "name": measured.name,
        "driver": measured.driver,
        "simulated": measured.simulated,
        "size": measured.size,
        "saved": measured.saved,
        "rounds": measured.rounds,
        "figures": rows,
        "notes": measured.notes,
    }


def draw(console: Console, measured: Measured) -> None:
    """Print the table of results, with one section for each group."""
    from rich.text import Text

    console.print(Text(f"memsaver {memsaver.__version__} on {measured.name}", style="bold"))
    text = size_text(measured.size)
    if measured.saved and measured.saved != measured.size:
        text += f", {size_text(measured.saved)} with a backup"
    console.print(Text(f"{text}; medians of {measured.rounds}, the first pause once", style="dim"))
    console.print(_table(console, measured))
    for note in measured.notes:
        console.print(Text(note, style="yellow"))
    if measured.simulated:
        console.print(Text(SIMULATED, style="yellow"))


def _table(console: Console, measured: Measured) -> Table:
    from rich.table import Table
    from rich.text import Text

    narrow = is_narrow(console)
    groups = _NARROW if narrow else _WIDE
    table = Table(box=simple_box(console), pad_edge=False, padding=(0, 1, 0, 0))
    add_columns(table, groups, least=8, left=("limit",))
    group = None
    for figure in measured.figures:
        if figure.group != group:
            if group is not None:
                table.add_section()
            group = figure.group
            table.add_row(Text(group, style="bold"))
        reached, limit = figure.of_limit_percent, figure.limit_seconds
        below = f"\n  limit: {figure.limit}" if narrow and figure.limit else ""
        limit_text = "" if limit is None else f"{1e3 * limit:,.1f}"
        cells = {
            "": f"  {figure.title}{below}",
            "ms": f"{1e3 * figure.median_seconds:,.1f}",
            "GiB/s": gibibytes(figure.bytes_per_second),
            "limit": figure.limit,
            " ms": limit_text,
            "limit ms": limit_text,
            "of limit": "" if reached is None else Text(f"{reached:,.0f} %", style="bold"),
        }
        table.add_row(*folded(groups, cells))
    return table


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows the current step if stderr is a terminal."""
    if not is_redrawable(sys.stderr):
        yield lambda step: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda step: status.update(step)


def _check_picture(picture: Path) -> None:
    """Exit with an error before any measurement, if the picture cannot be drawn afterwards."""
    from memsaver.traces.files import PICTURES

    if importlib.util.find_spec("matplotlib") is None:
        _fail("a picture needs matplotlib: pip install 'memsaver[plot]'", USAGE)
    if picture.suffix.lower() not in PICTURES:
        _fail(f"--picture {picture}: the name must end in one of {', '.join(PICTURES)}", USAGE)
    try:
        folder = picture.resolve().parent
    except (OSError, RuntimeError) as error:  # no current folder, or a cycle of links
        _fail(f"--picture {picture}: {error}", USAGE)
    if not folder.is_dir():
        _fail(f"--picture {picture}: the folder does not exist", USAGE)
