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

# metric -> what it is, in the order of the table
METRICS = {
    "kv_64GiB_pause_ms": "pause 64 GiB, no backup, ms",
    "kv_64GiB_resume_ms": "resume 64 GiB, no backup, ms",
    "discarded_16GB_pause_ms": "pause 16 GB in 195 tensors, no backup, ms",
    "discarded_16GB_resume_ms": "resume 16 GB in 195 tensors, no backup, ms",
    "many_10k_pause_ms": "pause 10,000 allocations of 2 MiB, ms",
    "many_10k_resume_ms": "resume 10,000 allocations of 2 MiB, ms",
    "kv_64GiB_pause_at_once_ms": "pause 64 GiB right after its resume, ms",
    "kv_64GiB_resume_at_once_ms": "resume 64 GiB right after its pause, ms",
    "region_bandwidth": "device copy in region memory, % of plain memory",
    "malloc_free_pair_512B_ns": "cudaMalloc + cudaFree of 512 B under preload, ns",
    "malloc_free_pair_1MiB_ns": "cudaMalloc + cudaFree of 1 MiB under preload, ns",
    "malloc_free_pair_2MiB_ns": "cudaMalloc + cudaFree of 2 MiB under preload, ns",
}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: one line a metric, the peer's default setting where it has several."""
    first: dict[str, dict[str, Any]] = {}
    for row in rows:
        first.setdefault(row["metric"], row)
    shown = [first[metric] for metric in METRICS if metric in first]
    versions = ", ".join(f"{name} {text}" for name, text in shown[0]["versions"].items())
    lines = [
        f"On one {shown[0]['gpu']}, {shown[0]['date']} ({versions}), medians of one run with the",
        "peer; `ratio` is how many times better memsaver is. Between a pause and its resume lies",
        'half a second, except where it says "right after".',
        "",
        "| | memsaver | peer | | ratio |",
        "|---|---|---|---|---|",
    ]
    for row in shown:
        lines.append(
            f"| {METRICS[row['metric']]} | {row['memsaver']:,.1f} | {row['peer']} "
            f"| {row['peer_value']:,.1f} | {row['ratio']:.2f} |"
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
