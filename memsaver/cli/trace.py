"""`memsaver trace`: what a saved timeline comes to, as a table, a page or a picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from memsaver.errors import MemsaverError
from memsaver.text import plain_text, size_text
from memsaver.traces.trace import Trace
from memsaver.traces.units import format_rate, format_seconds

if TYPE_CHECKING:  # imported when the command runs: other commands need none of it
    from rich.console import Console
    from rich.table import Table

    from memsaver.traces.summary import Moves, TagSummary

__all__ = ["command", "show"]


def command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A .json file that Timeline.save wrote."),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE.html",
            help="Write a page with an interactive chart, which needs nothing else.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="FILE.png|svg|pdf",
            help="Draw a picture; needs matplotlib (the extra `plot`).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show what a saved timeline comes to, tag by tag: peak, pauses, resumes, bytes and rates.

    To make one: [bold]with memsaver.timeline() as t: ...[/bold] and t.save("trace.json").

    ui.perfetto.dev and chrome://tracing open the same file.
    """
    from rich.console import Console

    from memsaver.traces.files import PICTURES, load, save

    if html is not None and html.suffix.lower() != ".html":
        _fail(f"--html writes a page, and {html.name!r} does not end in .html", 2)
    if picture is not None and picture.suffix.lower() not in PICTURES:
        _fail(
            f"--picture draws {', '.join(PICTURES)}, and {picture.name!r} ends in none of them", 2
        )
    with _failing(file):
        found = load(file)
    show(found, Console())
    for target in (html, picture):
        if target is not None:
            with _failing(file):
                save(found, target)
            typer.echo(f"wrote {target}", err=True)


def show(trace: Trace, console: Console) -> None:
    """Print a trace's summary."""
    from rich.text import Text

    from memsaver.traces.summary import summary

    calls = len({row.number for row in trace.transitions})
    head = f"{format_seconds(trace.seconds)} of process {trace.process}, {calls} calls"
    console.print(Text(head))
    if trace.dropped:
        console.print(
            Text(
                f"The oldest {trace.dropped} events were dropped, so this begins at "
                f"{format_seconds(trace.begin)}. Record with more room: "
                f"memsaver.timeline(events=...).",
                style="yellow",
            )
        )
    tags = summary(trace)
    if not tags:
        console.print(Text("No tag had memory, and nothing was paused or resumed."))
        return
    console.print(_table(tags))
    lowest = {
        device: min(row.free_bytes for row in trace.memory if row.device == device)
        for device in sorted({row.device for row in trace.memory})
    }
    for device, free in lowest.items():
        console.print(Text(f"GPU {device}: {size_text(free)} free at the least"))


def _table(tags: tuple[TagSummary, ...]) -> Table:
    import rich.box
    from rich.table import Table
    from rich.text import Text

    any_failed = any(row.out.failed or row.into.failed for row in tags)
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Tag", overflow="fold", min_width=16)
    for name in ("Done", *(["Failed"] if any_failed else []), "Memory", "Copied", "Time", "Rate"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in tags:
        held = Text.assemble((plain_text(row.tag), "bold"), (" peak", "dim"))
        table.add_row(held, *([""] * (1 + any_failed)), size_text(row.peak_bytes))
        for name, moves in (("paused", row.out), ("resumed", row.into)):
            if not any((row.out.count, row.out.failed, row.into.count, row.into.failed)):
                continue
            failed = [Text(str(moves.failed), style="red" if moves.failed else "")]
            done = Text(str(moves.count))
            table.add_row(f"  {name}", done, *(failed if any_failed else []), *_figures(moves))
    return table


def _figures(moves: Moves) -> list[str]:
    if not moves.count:
        return []
    return [
        size_text(moves.device_bytes),
        size_text(moves.copied_bytes),
        format_seconds(moves.seconds),
        format_rate(moves.rate) if moves.rate else "",
    ]


@contextmanager
def _failing(file: Path) -> Iterator[None]:
    """What cannot be read or written is said, and ends the command."""
    try:
        yield
    except OSError as error:
        _fail(f"{error.filename or file}: {error.strerror or error}", 1)
    except MemsaverError as error:
        _fail(f"{file}: {error}", 1)


def _fail(message: str, status: int) -> NoReturn:
    typer.echo(f"memsaver trace: {message}", err=True)
    raise typer.Exit(status)
