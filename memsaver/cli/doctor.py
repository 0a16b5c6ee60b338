"""`memsaver doctor`: check this machine and this environment for memsaver."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

import memsaver
from memsaver.cli.marks import marks_for
from memsaver.cli.tables import output_console

if TYPE_CHECKING:  # imported by the command itself: other commands do not need them
    from rich.console import Console
    from rich.table import Table

    from memsaver.cli.checks import Finding

__all__ = ["command"]

SCHEMA = 1  # incremented when a key of the JSON changes its meaning or is removed

# By level.
_COLOURS = {"good": "green", "absent": "dim", "warned": "yellow", "bad": "bold red"}


def command(
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the findings and the underlying values as JSON."),
    ] = False,
) -> None:
    """Check whether this machine and environment support memsaver, and suggest solutions to
    problems.

    The checks cover the driver and devices, NVML, torch, engines, preloading, NCCL, host memory,
    disk and options.

    A finding is good (a tick), absent but optional (-), warned (!) or bad (a cross). Warned means
    that memsaver works, but not optimally or not as expected. Bad means that memsaver does not
    work, or contents may be lost.

    The command creates no CUDA context and changes nothing. The exit status is 1 if a finding is
    bad.
    """
    from memsaver.cli.checks import Level, check_all, worst

    findings = check_all()
    if as_json:
        typer.echo(json.dumps(document(findings), indent=2))
    else:
        draw(output_console(), findings)
    raise typer.Exit(1 if worst(findings) is Level.BAD else 0)


def document(findings: dict[str, list[Finding]]) -> dict[str, Any]:
    """Return the findings as JSON."""
    from memsaver.cli.checks import Level, worst

    rows = [
        {"subject": subject, **dataclasses.asdict(finding)}
        for subject, group in findings.items()
        for finding in group
    ]
    return {
        "schema": SCHEMA,
        "memsaver": memsaver.__version__,
        "status": worst(findings),
        "counts": {level: sum(row["level"] is level for row in rows) for level in Level},
        "findings": rows,
    }


def draw(console: Console, findings: dict[str, list[Finding]]) -> None:
    """Print a table for each subject, the number of findings per level, and the bad findings."""
    from rich.text import Text

    from memsaver.cli.checks import Level

    for subject, group in findings.items():
        if group:
            console.print(Text(subject, style="bold"))
            console.print(_table(console, group))
            console.print()
    named: dict[Level, list[str]] = {level: [] for level in Level}
    for finding in (finding for group in findings.values() for finding in group):
        named[finding.level].append(finding.name)
    summary = Text(", ").join(
        Text(f"{len(names)} {level}", style=_COLOURS[level.value] if names else "dim")
        for level, names in named.items()
    )
    if named[Level.BAD]:
        summary.append(": " + ", ".join(named[Level.BAD]), style=_COLOURS["bad"])
    console.print(summary)


def _table(console: Console, group: list[Finding]) -> Table:
    from rich.table import Table
    from rich.text import Text

    marks, arrow = marks_for(console), "->" if console.options.ascii_only else "→"
    table = Table.grid(padding=(0, 1))
    table.add_column(width=2, justify="right")
    narrow = console.width < _NARROW
    if not narrow:
        table.add_column(width=_NAMES, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for finding in group:
        text = Text(finding.text)
        if finding.advice:
            style = "dim" if finding.level in ("good", "absent") else _COLOURS[finding.level.value]
            text.append(f"\n{arrow} {finding.advice}", style=style)
        mark = Text(marks[finding.level.value], style=_COLOURS[finding.level.value])
        name = Text(finding.name)
        cells = [Text(": ").join((name, text))] if narrow else [name, text]
        table.add_row(mark, *cells)
    return table


_NAMES = 22  # columns for the names of findings
_NARROW = 64  # on narrower terminals, the names have no column of their own
