"""Print tables of a run on a terminal."""

from __future__ import annotations

import statistics

import rich.box
from results import Results
from rich.console import Console
from rich.table import Table

GIB = 1 << 30


def draw(console: Console, results: Results) -> None:
    """Print the rewards, and the time and memory of each stage."""
    console.print(rewards(results))
    console.print(stages(results))
    total = results.total_bytes / GIB
    kind = "sleeping" if results.settings["sleep"] else "without sleep"
    console.print(f"{results.ranks} x {results.device} ({total:.0f} GiB each), {kind}")


def rewards(results: Results) -> Table:
    """Return a table with about ten of the run's steps."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "reward", "right", "loss", "gradient", "engine's gap"):
        table.add_column(name, justify="right")
    every = max(1, len(results.steps) // 10)
    last = len(results.steps) - 1
    for number, step in enumerate(results.steps):
        if number % every == 0 or number == last:
            table.add_row(
                str(number),
                f"{step.reward:.3f}",
                f"{100 * step.right:.1f} %",
                f"{step.loss:+.4f}",
                f"{step.gradient:.3f}",
                f"{step.gap:.4f}",
            )
    return table


def stages(results: Results) -> Table:
    """Return a table of the stages with the median duration and the highest peak of each stage."""
    table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage")
    for name in ("ms", "% of a step", "peak, GiB"):
        table.add_column(name, justify="right")
    medians = median_seconds(results)
    sum_of_medians = sum(medians.values()) or 1.0
    peaks = peak_bytes(results)
    for name, seconds in medians.items():
        table.add_row(
            name,
            f"{1e3 * seconds:,.1f}",
            f"{100 * seconds / sum_of_medians:.0f}",
            f"{peaks[name] / GIB:.2f}",
        )
    return table


def median_seconds(results: Results) -> dict[str, float]:
    """Return each stage's median duration; if possible, exclude the first step as a warm-up."""
    return {
        name: statistics.median([row["seconds"] for row in rows[1:] or rows])
        for name, rows in results.stages().items()
    }


def peak_bytes(results: Results) -> dict[str, float]:
    """Return each stage's highest memory peak."""
    return {name: max(row["peak_bytes"] for row in rows) for name, rows in results.stages().items()}
