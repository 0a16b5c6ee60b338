"""Make the tables of measurements in the pages of engines and training frameworks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import results

BENCH = "frameworks"

# For each page, in docs/how-to, the metrics and titles of its rows.
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
        ("verl_max_fraction", "largest gpu_memory_utilization that works"),
        ("verl_max_kv_tokens", "KV tokens with it"),
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


def pages(
    rows: Sequence[Mapping[str, Any]], how_to: Path, figure: Callable[[float], str]
) -> dict[Path, str]:
    """Return the table of each page.

    Args:
        rows: the rows of the results.
        how_to: the folder of the pages.
        figure: formats a value.
    """
    return {how_to / page: table(rows, BENCH, lines, figure) for page, lines in PAGES.items()}


def table(
    rows: Sequence[Mapping[str, Any]],
    bench: str,
    wanted: Sequence[tuple[str, str]],
    figure: Callable[[float], str],
) -> str:
    """Return the rows of a benchmark as Markdown, or a note that nothing was measured.

    Args:
        rows: the rows of all benchmarks.
        bench: the benchmark.
        wanted: the metrics with their titles; those without a row are omitted.
        figure: formats a value.
    """
    found = {row["metric"]: row for row in rows if row["bench"] == bench}
    by_gpu: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    for metric, words in wanted:
        if metric in found:
            by_gpu.setdefault(found[metric]["gpu"], []).append((found[metric], words))
    parts = [_of_one_gpu(shown, figure) for shown in by_gpu.values()]
    return "\n\n".join(parts) or "Not measured yet."


def _of_one_gpu(
    shown: Sequence[tuple[Mapping[str, Any], str]], figure: Callable[[float], str]
) -> str:
    first, _ = shown[0]
    days = sorted({row["date"] for row, _ in shown})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    rows = [row for row, _ in shown]
    versions = results.versions_text(rows)
    lines = [
        f"{medians(rows)} on {first['gpu']}, {when} ({versions}).",
        "A factor above 1 means that memsaver is better.",
        "",
        "| | memsaver | compared with | its value | factor |",
        "|---|--:|---|--:|--:|",
    ]
    for row, words in shown:
        ours = figure(row["memsaver"]) + " (once)" * is_single(row, "memsaver")
        theirs = figure(row["peer_value"]) + " (once)" * is_single(row, "peer")
        lines.append(f"| {words} | {ours} | {row['peer']} | {theirs} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def medians(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the first words of a table's heading, which say how its values were obtained."""
    has_single = any(is_single(row, side) for row in rows for side in ("memsaver", "peer"))
    return 'Medians, or single measurements (marked "once"),' if has_single else "Medians"


def is_single(row: Mapping[str, Any], side: str) -> bool:
    """Return whether a value of a row, "memsaver" or "peer", was measured once."""
    cycles = (row.get("detail") or {}).get(side)
    return isinstance(cycles, list) and len(cycles) == 1
