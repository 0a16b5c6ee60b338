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

# Metric, peer (None: the first in the file), and what it is, in the order of the table. What the
# file does not have is left out.
LINES: tuple[tuple[str, str | None, str], ...] = (
    ("kv_64GiB_pause_ms", None, "pause 64 GiB, no backup, ms"),
    ("kv_64GiB_resume_ms", None, "resume 64 GiB, no backup, ms"),
    ("discarded_16GB_pause_ms", None, "pause 16 GB in 195 tensors, no backup, ms"),
    ("discarded_16GB_resume_ms", None, "resume 16 GB in 195 tensors, no backup, ms"),
    ("many_10k_pause_ms", None, "pause 10,000 allocations of 2 MiB, ms"),
    ("many_10k_resume_ms", None, "resume 10,000 allocations of 2 MiB, ms"),
    ("kv_64GiB_pause_at_once_ms", None, "pause 64 GiB right after its resume, ms"),
    ("kv_64GiB_resume_at_once_ms", None, "resume 64 GiB right after its pause, ms"),
    ("swap_64GiB_ms", None, "swap 64 GiB for 64 GiB right after the last swap, no backup, ms"),
    ("swap_64GiB_spaced_ms", None, "the same half a second after the last swap, ms"),
    ("backed_first_pause_ms", DEFAULT, "first pause of 16 GB, backed up to the host, ms"),
    ("backed_changed_pause_ms", DEFAULT, "later pauses, all contents changed, ms"),
    ("backed_changed_pause_ms", RETAINED, "the same, ms"),
    ("backed_changed_resume_ms", DEFAULT, "resumes of 16 GB from the host, ms"),
    ("backed_changed_resume_ms", RETAINED, "the same, ms"),
    ("backed_changed_pause_rate", None, "rate of these pauses, % of a plain copy"),
    ("backed_changed_resume_rate", None, "rate of these resumes, % of a plain copy"),
    ("backed_unchanged_pause_ms", RETAINED, "pause of 16 GB, nothing changed, ms"),
    ("lora_pause_ms", RETAINED, "pause of 16 GB, 1 % of the tensors changed, ms"),
    ("swap_16GB_ms", None, "swap 16 GB for 16 GB, backed up to the host, ms"),
    ("two_gpu_backed_pause_ms", None, "pause of 16 GB on each of two GPUs, ms"),
    ("disk_pause_ms", DEFAULT, "pause of 8 GB, backed up to disk, ms"),
    ("disk_resume_ms", DEFAULT, "resume of 8 GB from disk, not cached, ms"),
    ("disk_pause_rate", None, "rate of these pauses, % of direct I/O"),
    ("disk_resume_rate", None, "rate of these resumes, % of direct I/O"),
    ("host_overhead_paused_MiB", DEFAULT, "host memory beyond 16 GB backed up, MiB"),
    ("host_overhead_trimmed_MiB", DEFAULT, "host memory left after a resume and trim, MiB"),
    ("sglang_release_weights_ms", None, "SGLang, 8B: release 16 GB of new weights, backed up, ms"),
    ("sglang_release_weights_unchanged_ms", None, "the same, weights as they were, ms"),
    ("sglang_resume_weights_ms", None, "SGLang, 8B: resume the weights, ms"),
    ("sglang_release_kv_ms", None, "SGLang, 8B: release the KV cache, ms"),
    ("sglang_resume_kv_ms", None, "SGLang, 8B: resume the KV cache, ms"),
    ("sglang_decode_tokens_per_s", None, "SGLang, 8B: decoding before and after, tokens/s"),
    ("sglang_resident_MiB", None, "SGLang, 8B: memory in use when all is released, MiB"),
    ("sglang_max_mem_fraction", None, "SGLang, 8B: largest mem_fraction_static beside a trainer"),
    ("region_bandwidth", None, "device copy in region memory, % of plain memory"),
    ("malloc_free_pair_512B_ns", None, "cudaMalloc + cudaFree of 512 B under preload, ns"),
    ("malloc_free_pair_1MiB_ns", None, "cudaMalloc + cudaFree of 1 MiB under preload, ns"),
    ("malloc_free_pair_2MiB_ns", None, "cudaMalloc + cudaFree of 2 MiB under preload, ns"),
)


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
        f"On one {first['gpu']}, or two where it says so, {first['date']} ({versions}), medians;",
        "the two of a row took turns in one run (SGLang engines: one after the other); `ratio` is",
        "how many times better memsaver is (memory counts as 1 MiB at least).",
        "Without a backup, half a second lies",
        'between a pause and its resume, except where it says "right after".',
        "",
        "| | memsaver | peer | | ratio |",
        "|---|---|---|---|---|",
    ]
    for words, row in shown:
        lines.append(
            f"| {words} | {row['memsaver']:,.1f} | {row['peer']} "
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
