"""Create the tables of measurements for the pages on engines and training frameworks."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import results

BENCH = "frameworks"
NOT_MEASURED = "Not measured yet:"

# Formats a value of a metric.
Figure = Callable[[float, str], str]

# For each page in docs/how-to, the metrics and titles of its rows.
PAGES: dict[str, tuple[tuple[str, str], ...]] = {
    "trl.md": (
        ("trl_sleep_wake_seconds", "first sleep and wake-up of the engine, s"),
        ("trl_sleep_wake_later_seconds", "later sleeps and wake-ups, s"),
        ("trl_step_seconds", "a training step, s"),
        ("trl_peak_MiB", "peak memory in use, MiB"),
    ),
    "verl.md": (
        ("verl_sleep_wake_seconds", "release and both resumes of the engine, s"),
        ("verl_update_weights_seconds", "update of the weights with both resumes, s"),
        ("verl_step_seconds", "a step, s"),
        ("verl_peak_MiB", "peak memory in use, MiB"),
        ("verl_kv_tokens", "KV tokens at gpu_memory_utilization 0.5"),
        ("verl_max_fraction", "largest gpu_memory_utilization that worked, of those tried"),
        ("verl_max_kv_tokens", "KV tokens at that gpu_memory_utilization"),
        ("verl_cycles_change_MiB", "change of the memory in use asleep, 50 steps, MiB"),
        ("verl_left_MiB", "memory left in use by trainers that Ctrl-C or an error ended, MiB"),
        ("verl_tp2_sleep_wake_seconds", "two GPUs: release and both resumes of the engine, s"),
        ("verl_tp2_update_weights_seconds", "two GPUs: update with both resumes, s"),
        ("verl_tp2_step_seconds", "two GPUs: a step, s"),
        ("verl_tp2_peak_MiB", "two GPUs: peak memory in use on the first, MiB"),
        ("verl_tp2_kv_tokens", "two GPUs: KV tokens at gpu_memory_utilization 0.5"),
    ),
    "transformers.md": (
        ("trainer_transition_seconds", "all releases and restores of a step, s"),
        ("trainer_step_seconds", "a training step with the reference's wake-up, s"),
        ("trainer_asleep_MiB", "memory in use between steps, MiB"),
        ("trainer_peak_MiB", "peak memory in use, MiB"),
    ),
}

# The metrics whose rows contain the seconds of verl's phases, and the phases in their order.
WITH_PHASES = {
    "verl_step_seconds": "Phases of a step",
    "verl_tp2_step_seconds": "Phases of a step on two GPUs",
}
PHASES = ("gen", "reward", "old_log_prob", "ref", "adv", "update_actor", "update_weights", "step")


def pages(rows: Sequence[Mapping[str, Any]], how_to: Path, figure: Figure) -> dict[Path, str]:
    """Return the tables of each page.

    Args:
        rows: the rows of the results.
        how_to: the folder of the pages.
        figure: formats a value.
    """
    return {
        how_to / page: "\n\n".join(
            filter(None, (table(rows, BENCH, lines, figure), phases(rows, lines)))
        )
        for page, lines in PAGES.items()
    }


def table(
    rows: Sequence[Mapping[str, Any]],
    bench: str,
    wanted: Sequence[tuple[str, str]],
    figure: Figure,
) -> str:
    """Return a benchmark's rows as Markdown tables, and a list of the metrics without a row.

    Args:
        rows: the rows of all benchmarks.
        bench: the benchmark.
        wanted: the metrics with their titles.
        figure: formats a value.
    """
    found = {row["metric"]: row for row in rows if row["bench"] == bench}
    by_gpu: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    for metric, words in wanted:
        if metric in found:
            by_gpu.setdefault(found[metric]["gpu"], []).append((found[metric], words))
    parts = [_of_one_gpu(shown, figure) for shown in by_gpu.values()]
    missing = [words for metric, words in wanted if metric not in found]
    if missing:
        names = (f"- {re.sub(', (s|MiB)$', '', words)}" for words in missing)
        parts.append("\n".join([NOT_MEASURED, "", *names]))
    return "\n\n".join(parts)


def _of_one_gpu(shown: Sequence[tuple[Mapping[str, Any], str]], figure: Figure) -> str:
    rows = [row for row, _ in shown]
    lines = [
        f"{medians(rows)} on {circumstances(rows)}.",
        "A factor above 1 means that memsaver is better.",
        "",
        "| | memsaver | compared with | its value | factor |",
        "|---|--:|---|--:|--:|",
    ]
    for row, words in shown:
        metric = row["metric"]
        ours = figure(row["memsaver"], metric) + " (once)" * is_single(row, "memsaver")
        theirs = figure(row["peer_value"], metric) + " (once)" * is_single(row, "peer")
        lines.append(f"| {words} | {ours} | {row['peer']} | {theirs} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def circumstances(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the GPU, the dates and the versions of rows for one kind of GPU."""
    days = sorted({row["date"] for row in rows})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{rows[0]['gpu']}, {when} ({results.versions_text(rows)})"


def phases(rows: Sequence[Mapping[str, Any]], wanted: Sequence[tuple[str, str]]) -> str:
    """Return tables of the steps' phases, for the wanted metrics with phases."""
    found = {row["metric"]: row for row in rows if row["bench"] == BENCH}
    shown = [metric for metric, _ in wanted if metric in found and metric in WITH_PHASES]
    return "\n\n".join(_phases(found[metric]) for metric in shown)


def _phases(row: Mapping[str, Any]) -> str:
    """Return a table of a row's phases, followed by a comparison of the two runs' results."""
    ours, theirs = row["detail"]["memsaver_phases"], row["detail"]["peer_phases"]
    others = sorted(set(ours) - set(PHASES))
    names = [name for name in (*PHASES[:-1], *others, PHASES[-1]) if name in ours]
    steps = len(next(iter(ours.values())))
    lines = [
        f"{WITH_PHASES[row['metric']]}, as verl reports them (`timing_s/*`): mean seconds of steps "
        f"2 to {steps}, on {circumstances([row])}.",
        "",
        f"| phase | memsaver | {row['peer']} | factor |",
        "|---|--:|--:|--:|",
    ]
    for name in names:
        mine = statistics.fmean(ours[name][1:])
        peers = statistics.fmean(theirs.get(name, (0.0, 0.0))[1:])
        factor = f"{peers / mine:.2f}" if mine and peers else ""
        lines.append(f"| `{name}` | {mine:.3f} | {peers:.3f} | {factor} |")
    return "\n".join([*lines, "", _compared(row)])


def _compared(row: Mapping[str, Any]) -> str:
    """Return a sentence about the differences between the training runs' results."""
    detail = row["detail"]
    steps = len(next(iter(detail["memsaver_phases"].values())))
    count = 4 * steps
    figures = (
        f"Of the {count} compared results (loss, gradient norm, score and responses of each of "
        f"these {steps} steps)"
    )
    if not detail["differences"]:
        return f"{figures}, none differ from those with {row['peer']}."
    between = len(detail["differences_of_the_peer"])
    return (
        f"{figures}, {len(detail['differences'])} differ from those with {row['peer']}, and "
        f"{between} differ between two training runs with {row['peer']}."
    )


def medians(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the first words of a table's heading, which state how the values were obtained."""
    has_single = any(is_single(row, side) for row in rows for side in ("memsaver", "peer"))
    return 'Medians, or single measurements (marked "once"),' if has_single else "Medians"


def is_single(row: Mapping[str, Any], side: str) -> bool:
    """Return whether a row's value, either "memsaver" or "peer", was measured only once."""
    cycles = (row.get("detail") or {}).get(side)
    return isinstance(cycles, list) and len(cycles) == 1
