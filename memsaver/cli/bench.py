"""`memsaver bench`: what this machine's bus and driver can do, and how near memsaver comes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import memsaver
from memsaver.cli.sizes import gigabytes, parse_bytes
from memsaver.errors import MemsaverError
from memsaver.text import size_text

if TYPE_CHECKING:  # imported when the command runs: other commands need none of it
    from rich.console import Console

    from memsaver.cli.measurements import Measured

__all__ = ["command"]

SCHEMA = 1  # raised when a key of the JSON changes its meaning or goes

SIMULATED = (
    "On the simulated driver the times are this CPU's: they say nothing about memsaver or any GPU."
)


def command(
    size: Annotated[
        str | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            help="Memory to measure with, such as 16GiB. Without it up to 16 GiB, as it fits into "
            "the free memory of the device and the host.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[int, typer.Option("--device", min=0, help="The device's index.")] = 0,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, max=1000, help="How often each thing is measured.")
    ] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, every time among them.")
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE",
            help="Draw a picture too (.png, .svg or .pdf). Needs matplotlib: "
            "pip install 'memsaver\\[plot]'.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Measure this machine's bus and driver, and memsaver's pauses and resumes against them.

    It takes half a minute, and device and host memory meanwhile: not beside what needs these.

    Every resume's contents are checked. No torch is needed.
    """
    from memsaver.cli.measurements import measure_machine

    try:
        wanted = parse_bytes(size) if size is not None else None
    except ValueError as error:
        _fail(f"--size: {error}", 2)
    if picture is not None:
        _check_picture(picture)
    try:
        with _status() as telling:
            measured = measure_machine(wanted, rounds, device, telling)
    except MemsaverError as error:
        _fail(str(error), 1)
    if as_json:
        typer.echo(json.dumps(document(measured), indent=2))
    else:
        from rich.console import Console

        draw(Console(highlight=False), measured)
    if picture is not None:
        from memsaver.cli.measurements.picture import draw_picture
        from memsaver.whole_files import replace_file

        try:
            replace_file(picture, draw_picture(measured, picture.suffix[1:].lower()))
        except OSError as error:
            _fail(f"the picture could not be written: {error}", 1)
        if not as_json:
            typer.echo(f"picture: {picture}")


def document(measured: Measured) -> dict[str, Any]:
    """The figures as JSON has them: sizes in bytes, times in seconds."""
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
    """The table, with a section for each group."""
    import rich.box
    from rich.table import Table
    from rich.text import Text

    console.print(Text(f"memsaver {memsaver.__version__} on {measured.name}", style="bold"))
    text = size_text(measured.size)
    if measured.saved and measured.saved != measured.size:
        text += f", {size_text(measured.saved)} with a backup"
    console.print(Text(f"{text}; medians of {measured.rounds}, the first pause once", style="dim"))
    box = rich.box.ASCII2 if console.options.ascii_only else rich.box.SIMPLE_HEAD
    table = Table(box=box, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("ms", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limit", overflow="fold")
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("of limit", justify="right", no_wrap=True)
    group = None
    for figure in measured.figures:
        if figure.group != group:
            if group is not None:
                table.add_section()
            group = figure.group
            table.add_row(Text(group, style="bold"))
        reached, limit = figure.of_limit_percent, figure.limit_seconds
        table.add_row(
            Text(f"  {figure.title}"),
            f"{1e3 * figure.median_seconds:,.1f}",
            gigabytes(figure.bytes_per_second),
            figure.limit,
            "" if limit is None else f"{1e3 * limit:,.1f}",
            "" if reached is None else Text(f"{reached:,.0f} %", style="bold"),
        )
    console.print(table)
    for note in measured.notes:
        console.print(Text(note, style="yellow"))
    if measured.simulated:
        console.print(Text(SIMULATED, style="yellow"))


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """What is being done, on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda step: status.update(step)


def _check_picture(picture: Path) -> None:
    """Refuse before anything is measured what could not be drawn afterwards."""
    from memsaver.traces.files import PICTURES

    if importlib.util.find_spec("matplotlib") is None:
        _fail("a picture needs matplotlib: pip install 'memsaver[plot]'", 2)
    if picture.suffix.lower() not in PICTURES:
        _fail(f"--picture {picture}: the name must end in one of {', '.join(PICTURES)}", 2)
    if not picture.resolve().parent.is_dir():
        _fail(f"--picture {picture}: there is no such folder", 2)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"memsaver bench: {message}", err=True)
    raise typer.Exit(status)
