"""Write the tables in README.md and in pages of docs/ from results/h200.json and h100.json.

usage: readme_table.py     writes them between the markers in these files
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import framework_tables
import results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = results.DEFAULT_PATH
README = ROOT / "README.md"
COMPARISON = ROOT / "docs" / "comparison.md"
VLLM = ROOT / "docs" / "vllm.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

DEFAULT = "torch_memory_saver"
RETAINED = "torch_memory_saver, retained backup"

# Metric and title of each row. A row shows memsaver beside the peer's default and best settings;
# docs/measured.md has the other metrics.
LINES: tuple[tuple[str, str], ...] = (
    ("kv_64GiB_pause_ms", "pause 64 GiB without a backup, ms"),
    ("kv_64GiB_resume_ms", "resume 64 GiB without a backup, ms"),
    ("backed_changed_pause_ms", "pause 16 GB with a backup in host memory, all of it changed, ms"),
    ("backed_unchanged_pause_ms", "the same pause, nothing changed, ms"),
    ("backed_changed_resume_ms", "resume 16 GB from host memory, ms"),
    ("rl_transition_seconds", "all pauses and resumes of an RL step, 8B model, s"),
    (
        "rl_step_overhead_seconds",
        "time added to an RL step if memsaver overlaps copies with the step's work, s",
    ),
)

# The rows of docs/comparison.md: the README's, and those in which the peer is better.
COMPARED = (
    *LINES[:2],
    ("many_10k_pause_ms", "pause 10,000 allocations of 2 MiB without a backup, ms"),
    ("many_10k_resume_ms", "resume them, ms"),
    ("backed_first_pause_ms", "first pause of 16 GB with a backup in host memory, ms"),
    *LINES[2:5],
    ("backed_unchanged_resume_ms", "resume 16 GB after a pause that copied nothing, ms"),
    ("lora_pause_ms", "pause 16 GB, 1 % of the tensors changed, ms"),
    ("disk_pause_ms", "pause 8 GB with a backup on disk, ms"),
    ("disk_resume_ms", "resume 8 GB from disk, not cached, ms"),
    ("host_overhead_paused_MiB", "host memory in addition to a backup of 16 GB, MiB"),
    ("host_overhead_trimmed_MiB", "host memory left after a resume and trim, MiB"),
    ("sglang_release_weights_ms", "SGLang, 8B: release 16 GB of new weights with a backup, ms"),
    ("sglang_resume_weights_ms", "SGLang, 8B: resume the weights, ms"),
    ("sglang_release_kv_ms", "SGLang, 8B: release the KV cache, ms"),
    ("sglang_resume_kv_ms", "SGLang, 8B: resume the KV cache, ms"),
    ("sglang_resident_MiB", "SGLang, 8B: memory in use with all tags released, MiB"),
    ("rl_kv_wake_ms", "RL step, 8B: resume the KV cache right after the trainer's pause, ms"),
    *LINES[5:],
)


# The rows of docs/vllm.md.
ENGINES = (
    ("vllm_sleep_first_ms", "first sleep at level 1, ms"),
    ("vllm_sleep_changed_ms", "sleep at level 1, all weights changed, ms"),
    ("vllm_sleep_unchanged_ms", "sleep at level 1, weights unchanged, ms"),
    ("vllm_wake_weights_ms", "wake the weights, ms"),
    ("vllm_wake_kv_ms", "wake the KV cache, ms"),
    ("vllm_decode_tokens_per_s", "decoding of 8 sequences, tokens/s"),
    ("vllm_resident_MiB", "memory in use, asleep, MiB"),
)
ENGINES_ON_TWO = tuple(
    (metric.replace("vllm_", "vllm_tp2_"), f"tensor parallelism on two GPUs: {words}")
    for metric, words in ENGINES
)


def figure(value: float, metric: str) -> str:
    """Format a value of a metric for the tables."""
    if metric.endswith(results.COUNTS):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) > 1 else f"{value:.3g}"


def dates(rows: list[dict[str, Any]]) -> str:
    """Return the dates of the measurements."""
    found = sorted({row["date"] for row in rows})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def table(rows: list[dict[str, Any]], wanted: tuple[tuple[str, str], ...] = LINES) -> str:
    """Return the wanted rows as Markdown, without the metrics that the file lacks."""
    shown = []
    for metric, words in wanted:
        by_peer = {row["peer"]: row for row in rows if row["metric"] == metric}
        if by_peer:
            shown.append((words, by_peer))
    all_rows = [row for _, by_peer in shown for row in by_peer.values()]
    first = all_rows[0]
    lines = [
        f"{framework_tables.medians(all_rows)} on one {first['gpu']}, {dates(all_rows)}",
        f"({results.versions_text(all_rows)}). Lower is better.",
        "",
        "| | memsaver | torch_memory_saver, default | torch_memory_saver, retained |",
        "|---|--:|--:|--:|",
    ]
    for words, by_peer in shown:
        own = next(iter(by_peer.values()))
        once = " (once)" * framework_tables.is_single(own, "memsaver")
        ours = figure(own["memsaver"], own["metric"]) + once
        theirs = (their_figure(by_peer.get(peer)) for peer in (DEFAULT, RETAINED))
        lines.append(f"| {words} | {ours} | {' | '.join(theirs)} |")
    return "\n".join(lines)


def their_figure(row: dict[str, Any] | None) -> str:
    """Return the peer's value and ratio in a row, or the reason why there is no value."""
    if row is None:
        return "not measured"
    if row["peer_value"] is None:
        return "ended"
    ratio = row["ratio"]
    once = ", once" * framework_tables.is_single(row, "peer")
    return (
        f"{figure(row['peer_value'], row['metric'])} ({ratio:,.{0 if ratio >= 100 else 2}f}x{once})"
    )


def pages(rows: list[dict[str, Any]]) -> dict[Path, str]:
    """Return the table of each page."""
    return {
        README: table(rows),
        COMPARISON: table(rows, COMPARED),
        VLLM: framework_tables.table(rows, "vllm_cycle", (*ENGINES, *ENGINES_ON_TWO), figure),
        **framework_tables.pages(rows, ROOT / "docs" / "how-to", figure),
    }


def rewritten(page: str, new: str) -> str:
    """Return the page with its table replaced."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def main() -> None:
    """Write the tables."""
    rows = results.measured()
    for path, new in pages(rows).items():
        path.write_text(rewritten(path.read_text(), new))


if __name__ == "__main__":
    main()
