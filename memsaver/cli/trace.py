"""`memsaver trace`: show a saved timeline as a table, a page or a picture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memsaver
from memsaver._runtime.text import plain_text, size_text
from memsaver.cli.failures import FAILURE, USAGE, fail
from memsaver.cli.tables import (
    Groups,
    add_columns,
    folded,
    groups_for,
    is_narrow,
    output_console,
    simple_box,
)
from memsaver.cli.units import format_rate, format_seconds
from memsaver.errors import MemsaverError
from memsaver.traces.trace import Trace

if TYPE_CHECKING:  # imported by the command itself: other commands do not need them
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from memsaver.cli.trace_summary import Moves, TagSummary

__all__ = ["command", "document", "show"]

_fail = partial(fail, "memsaver trace")

SCHEMA = 1  # incremented when a key of the JSON changes its meaning or is removed


def command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A .json file written by Timeline.save."),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE.html",
            help="Write a self-contained page with an interactive chart.",
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, in bytes and seconds.")
    ] = False,
) -> None:
    """Summarize a saved timeline by tag, with peak, pauses, resumes, bytes and rates.

    To record a timeline, use `with memsaver.timeline() as t: ...`, then t.save("trace.json").

    ui.perfetto.dev and chrome://tracing can open the same file.
    """
    from memsaver.traces.files import PICTURES, load, save

    if html is not None and html.suffix.lower() != ".html":
        _fail(f"--html writes a page, and {html.name!r} does not end in .html", USAGE)
    if picture is not None and picture.suffix.lower() not in PICTURES:
        _fail(
            f"--picture draws {', '.join(PICTURES)}, and {picture.name!r} has another ending",
            USAGE,
        )
    with _failing(file):
        found = load(file)
    if as_json:
        typer.echo(json.dumps(document(found), indent=2))
    else:
        show(found, output_console())
    for target in (html, picture):
        if target is not None:
            with _failing(file):
                save(found, target)
            typer.echo(f"wrote {target}", err=True)


def document(trace: Trace) -> dict[str, Any]:
    """Return a trace's summary as JSON: sizes in bytes, times in seconds."""
    from memsaver.cli.trace_summary import summary

    return {
        "schema": SCHEMA,
        "memsaver": memsaver.__version__,
        "process": trace.process,
        "started": trace.started,
        "seconds": trace.seconds,
        "dropped": trace.dropped,
        "begin_seconds": trace.begin,
        "calls": _calls(trace),
        "tags": [
            {
                "tag": row.tag,
                "peak_bytes": row.peak_bytes,
                "pauses": _document_of(row.out),
                "resumes": _document_of(row.into),
            }
            for row in summary(trace)
        ],
        "devices": [
            {"device": device, "least_free_bytes": free}
            for device, free in _least_free(trace).items()
        ],
    }


def _document_of(moves: Moves) -> dict[str, Any]:
    return {**dataclasses.asdict(moves), "bytes_per_second": moves.rate}


def _calls(trace: Trace) -> int:
    return len({row.number for row in trace.transitions})


def _least_free(trace: Trace) -> dict[int, int]:
    """Return the minimum free memory of each device with samples."""
    least: dict[int, int] = {}
    for row in trace.memory:
        least[row.device] = min(row.free_bytes, least.get(row.device, row.free_bytes))
    return dict(sorted(least.items()))


def show(trace: Trace, console: Console) -> None:
    """Print a trace's summary."""
    from rich.text import Text

    from memsaver.cli.trace_summary import summary

    calls = _calls(trace)
    head = f"{format_seconds(trace.seconds)} of process {trace.process}, "
    head += f"{calls} call{'' if calls == 1 else 's'}"
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
    console.print(_table(tags, console))
    for device, free in _least_free(trace).items():
        console.print(Text(f"GPU {device}: at least {size_text(free, down=True)} free"))


def _table(tags: tuple[TagSummary, ...], console: Console) -> Table:
    from rich.table import Table
    from rich.text import Text

    any_failed = any(row.out.failed or row.into.failed for row in tags)
    table = Table(box=simple_box(console), pad_edge=False, padding=(0, 1, 0, 0))
    counts: Groups = (("Done",), ("Failed",)) if any_failed else (("Done",),)
    groups = groups_for(console, (("Tag",), *counts, ("Memory", "Copied"), ("Time", "Rate")))
    add_columns(table, groups, least=10 if is_narrow(console) else 16)
    for row in tags:
        held = Text.assemble((plain_text(row.tag), "bold"), (" peak", "dim"))
        table.add_row(*folded(groups, {"Tag": held, "Memory": size_text(row.peak_bytes)}))
        for name, moves in (("paused", row.out), ("resumed", row.into)):
            if any((row.out.count, row.out.failed, row.into.count, row.into.failed)):
                table.add_row(*folded(groups, {"Tag": f"  {name}", **_figures(moves)}))
    return table


def _figures(moves: Moves) -> dict[str, Text | str]:
    from rich.text import Text

    counts: dict[str, Text | str] = {
        "Done": str(moves.count),
        "Failed": Text(str(moves.failed), style="red" if moves.failed else ""),
    }
    if not moves.count:
        return counts
    return {
        **counts,
        "Memory": size_text(moves.device_bytes),
        "Copied": size_text(moves.copied_bytes),
        # The duration is unknown if the transitions' start records were dropped.
        "Time": format_seconds(moves.seconds) if moves.seconds else "",
        "Rate": format_rate(moves.rate) if moves.rate else "",
    }


@contextmanager
def _failing(file: Path) -> Iterator[None]:
    """Report a file that cannot be read or written, and exit with an error."""
    try:
        yield
    except OSError as error:
        _fail(f"{error.filename or file}: {error.strerror or error}", FAILURE)
    except MemsaverError as error:
        _fail(f"{file}: {error}", FAILURE)
