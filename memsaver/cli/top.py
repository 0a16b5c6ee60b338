"""`memsaver top`: show the processes on this machine that use memsaver, and their tags."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import memsaver
from memsaver._inspection.statistics import Stats, TagStats
from memsaver.cli.failures import FAILURE, USAGE, fail
from memsaver.cli.process_tables import HOW_TO_BE_SEEN, view
from memsaver.cli.tables import is_redrawable, output_console
from memsaver.cli.watched import Found, find_processes

if TYPE_CHECKING:  # rich is slow to import
    from rich.console import Console, RenderableType

__all__ = ["command", "document"]

_fail = partial(fail, "memsaver top")

SCHEMA = 1  # incremented when a key of the JSON changes its meaning or is removed


def command(
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            min=0.1,
            max=3600,
            metavar="SECONDS",
            help="The update interval in seconds; 1 by default.",
            show_default=False,
        ),
    ] = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Print the state once. This is the default if stdout is not a terminal.",
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print all figures of `memsaver.stats()` as JSON."),
    ] = False,
    pid: Annotated[
        int | None,
        typer.Option(
            "--pid", min=1, metavar="PID", help="Show only this process.", show_default=False
        ),
    ] = None,
) -> None:
    """Show a live view of the processes on this machine that use memsaver, and of their tags.

    For each tag and device, the view shows the state, the resident and the paused memory, the
    backup, and the duration of the last transition.

    The command shows only processes of this user, and does not attach to them. Press Ctrl-C to
    quit.
    """
    from rich.console import Console

    if interval is not None and (as_json or once):
        _fail(f"--interval and {'--json' if as_json else '--once'} exclude each other", USAGE)
    if as_json or once or not is_redrawable(sys.stdout):
        found = find_processes(pid)
        if as_json:
            typer.echo(json.dumps(document(found), indent=2))
        elif pid is None or found.processes or found.silent:
            console = output_console()
            console.print(view(found, console))
        if pid is not None and not found.processes:
            _fail(_why_not(found, pid), FAILURE)
        return
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        _watch(console, 1.0 if interval is None else interval, pid)
    except KeyboardInterrupt:
        pass


def document(found: Found) -> dict[str, Any]:
    """Return the processes as JSON: sizes in bytes, times in seconds, rates in bytes per second."""
    return {
        "schema": SCHEMA,
        "memsaver": memsaver.__version__,
        "processes": [
            {
                "pid": process.pid,
                "command": process.command,
                "memsaver": process.memsaver,
                "driver": None if process.driver is None else process.driver._asdict(),
                "host_bytes": process.host_bytes,
                "host_available_bytes": process.host_available_bytes,
                **_properties(
                    Stats(
                        tuple(tag.stats for tag in process.tags),
                        process.host_bytes,
                        process.host_available_bytes,
                    )
                ),
                "devices": [device._asdict() for device in process.devices],
                "tags": [
                    {
                        **dataclasses.asdict(tag.stats),
                        **_properties(tag.stats),
                        "in_state_seconds": tag.age,
                        "caller": tag.caller,
                    }
                    for tag in process.tags
                ],
            }
            for process in found.processes
        ],
        "silent": [dataclasses.asdict(process) for process in found.silent],
        "refused": list(found.refused),
    }


def _properties(stats: Stats | TagStats) -> dict[str, Any]:
    """Return the values that `stats` computes from its fields."""
    found = vars(type(stats)).items()
    return {name: getattr(stats, name) for name, value in found if isinstance(value, property)}


def _watch(console: Console, interval: float, pid: int | None) -> NoReturn:
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            found = find_processes(pid)
            head = Text(f"memsaver top  {time.strftime('%H:%M:%S')}  Ctrl-C quits", style="dim")
            live.update(_fitted(Group(head, Text(), view(found, console)), console), refresh=True)
            time.sleep(interval)


def _fitted(whole: RenderableType, console: Console) -> RenderableType:
    """Return the lines that fit on the screen, and a note about the other lines."""
    from rich.console import Group
    from rich.segment import Segment, SegmentLines
    from rich.text import Text

    lines = console.render_lines(whole, pad=False)
    room = console.height
    if len(lines) <= room:
        return whole
    shown: list[list[Segment]] = lines[: room - 1]
    note = f"{len(lines) - room + 1} more lines: memsaver top --once shows all"
    return Group(SegmentLines(shown, new_lines=True), Text(note, style="yellow"))


def _why_not(found: Found, pid: int) -> str:
    for silent in found.silent:
        return f"process {pid}: {silent.why}"
    return f"process {pid} is not among those that use memsaver. {HOW_TO_BE_SEEN}"
