"""Writes the table of measured figures in README.md from benchmarks/results/h200.json.

python benchmarks/readme_table.py           between the markers in README.md
python benchmarks/readme_table.py --check   exit status 1 if it is not what is there
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

DEFAULT = "torch_memory_saver"
RETAINED = "torch_memory_saver, retained backup"

ALONE = "memsaver, the engine alone on the GPU"

# Metric, peer (None: the first in the file), and what it is, in the order of the table. What the
# file does not have is left out; what is left out here is in docs/measured.md.
LINES: tuple[tuple[str, str | None, str], ...] = (
    ("sglang_release_weights_ms", None, "SGLang, 8B: release 16 GB of new weights, backed up, ms"),
    ("sglang_release_weights_unchanged_ms", None, "SGLang, 8B: the same, weights as they were, ms"),
    ("sglang_resume_weights_ms", None, "SGLang, 8B: resume the weights, ms"),
    ("sglang_release_kv_ms", None, "SGLang, 8B: release the KV cache, ms"),
    ("sglang_resume_kv_ms", None, "SGLang, 8B: resume the KV cache, ms"),
    ("sglang_decode_tokens_per_s", None, "SGLang, 8B: decoding before and after, tokens/s"),
    ("sglang_resident_MiB", None, "SGLang, 8B: memory in use when all is released, MiB"),
    ("sglang_max_mem_fraction", None, "SGLang, 8B: largest mem_fraction_static beside a trainer"),
    ("rl_transition_seconds", DEFAULT, "RL step, 8B: all transitions of engine and trainer, s"),
    ("rl_transition_seconds", RETAINED, "RL step, 8B: all transitions of engine and trainer, s"),
    ("rl_kv_tokens_fraction", ALONE, "RL step, 8B: KV tokens, waking in stages beside a trainer"),
    ("rl_kv_tokens_fraction_at_once", ALONE, "RL step, 8B: the same, waking all at once"),
    ("kv_64GiB_pause_ms", None, "pause 64 GiB, no backup, ms"),
    ("kv_64GiB_resume_ms", None, "resume 64 GiB, no backup, ms"),
    ("many_10k_pause_ms", None, "pause 10,000 allocations of 2 MiB, ms"),
    ("many_10k_resume_ms", None, "resume 10,000 allocations of 2 MiB, ms"),
    ("swap_64GiB_ms", None, "swap 64 GiB for 64 GiB, no backup, ms"),
    ("backed_first_pause_ms", DEFAULT, "first pause of 16 GB, backed up to the host, ms"),
    ("backed_changed_pause_ms", DEFAULT, "later pauses, all contents changed, ms"),
    ("backed_changed_pause_ms", RETAINED, "later pauses, all contents changed, ms"),
    ("backed_changed_resume_ms", DEFAULT, "resumes of 16 GB from the host, ms"),
    ("backed_unchanged_pause_ms", RETAINED, "pauses of 16 GB, nothing changed, ms"),
    ("disk_pause_ms", DEFAULT, "pause of 8 GB, backed up to disk, ms"),
    ("disk_resume_ms", DEFAULT, "resume of 8 GB from disk, not cached, ms"),
    ("host_overhead_paused_MiB", DEFAULT, "host memory beyond 16 GB backed up, MiB"),
    ("region_bandwidth", None, "device copy in region memory, % of plain memory"),
    ("malloc_free_pair_512B_ns", None, "cudaMalloc + cudaFree of 512 B under preload, ns"),
)


def figure(value: float) -> str:
    """A value of a row, as the tables show it."""
    return f"{value:,.1f}" if abs(value) > 1 else f"{value:.3g}"


def dates(rows: list[dict[str, Any]]) -> str:
    """When the rows were measured."""
    found = sorted({row["date"] for row in rows})
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, as LINES says."""
    shown = []
    for metric, peer, words in LINES:
        of = (row for row in rows if row["metric"] == metric and peer in (None, row["peer"]))
        row = next(of, None)
        if row is not None:
            shown.append((words, row))
    first = shown[0][1]
    versions = ", ".join(f"{name} {text}" for name, text in first["versions"].items())
    lines = [
        f"On one {first['gpu']}, or two where it says so, {dates([row for _, row in shown])}",
        f"({versions}), medians;",
        "the two of a row took turns in one run (SGLang engines: one after the other); `ratio` is",
        "how many times better memsaver is. All rows: [measured](docs/measured.md).",
        "",
        "| | memsaver | peer | | ratio |",
        "|---|---|---|---|---|",
    ]
    for words, row in shown:
        ended = row["peer_value"] is None
        theirs, ratio = (
            ("ended", "") if ended else (figure(row["peer_value"]), f"{row['ratio']:.2f}")
        )
        lines.append(
            f"| {words} | {figure(row['memsaver'])} | {row['peer']} | {theirs} | {ratio} |"
        )
    return "\n".join(lines)


def rewritten(readme: str, rows: list[dict[str, Any]]) -> str:
    """The README with the table of these rows."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def main() -> None:
    """Writes, or checks."""
    readme = README.read_text()
    wanted = rewritten(readme, json.loads(RESULTS.read_text()))
    if "--check" in sys.argv:
        sys.exit(0 if wanted == readme else "README.md: run benchmarks/readme_table.py")
    README.write_text(wanted)


if __name__ == "__main__":
    main()
