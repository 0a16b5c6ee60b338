"""Writes docs/measured.md, the page of what was measured, from benchmarks/results.

python benchmarks/measured_page.py           docs/measured.md
python benchmarks/measured_page.py --check   exit status 1 if it is not what is there
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from readme_table import LINES, RESULTS, ROOT, dates, figure

PAGE = ROOT / "docs" / "measured.md"
LIMITS = RESULTS.with_name("limits.json")
RELIABILITY = RESULTS.with_name("reliability.json")

# Beginnings of metrics, by section. A metric belongs to the first that fits.
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Swaps", ("swap_",)),
    ("Without a backup", ("kv_", "discarded_", "many_")),
    ("Backed up to the host", ("backed_", "lora_", "two_gpu_")),
    ("Backed up to disk", ("disk_",)),
    ("Host memory", ("host_",)),
    ("SGLang, an 8B model", ("sglang_",)),
    ("A step of RL, an 8B model", ("rl_",)),
    ("What a region costs while it is there", ("region_", "malloc_")),
    ("Others", ("",)),
)
ORDER = (1, 2, 0, 3, 4, 5, 6, 7, 8)

# Those that the README's table leaves out, or names in fewer words.
WORDS = {
    "discarded_16GB_pause_at_once_ms": "pause 16 GB in 195 tensors right after its resume, ms",
    "discarded_16GB_resume_at_once_ms": "resume 16 GB in 195 tensors right after its pause, ms",
    "many_10k_pause_at_once_ms": "pause 10,000 allocations right after their resume, ms",
    "many_10k_resume_at_once_ms": "resume 10,000 allocations right after their pause, ms",
    "backed_changed_pause_ms": "later pauses of 16 GB, all contents changed, ms",
    "backed_unchanged_resume_ms": "resume of 16 GB from the host after an unchanged pause, ms",
    "discarded_16GB_pause_ms": "pause 16 GB in 195 tensors, no backup, ms",
    "discarded_16GB_resume_ms": "resume 16 GB in 195 tensors, no backup, ms",
    "kv_64GiB_pause_at_once_ms": "pause 64 GiB right after its resume, ms",
    "kv_64GiB_resume_at_once_ms": "resume 64 GiB right after its pause, ms",
    "swap_64GiB_ms": "swap 64 GiB for 64 GiB right after the last swap, no backup, ms",
    "swap_64GiB_spaced_ms": "the same half a second after the last swap, ms",
    "swap_16GB_ms": "swap 16 GB for 16 GB, backed up to the host, ms",
    "backed_changed_pause_rate": "rate of these pauses, % of a plain copy",
    "backed_changed_resume_rate": "rate of these resumes, % of a plain copy",
    "lora_pause_ms": "pause of 16 GB, 1 % of the tensors changed, ms",
    "two_gpu_backed_pause_ms": "pause of 16 GB on each of two GPUs, ms",
    "two_gpu_backed_resume_ms": "resume of 16 GB on each of two GPUs, ms",
    "disk_pause_rate": "rate of these pauses, % of direct I/O",
    "disk_resume_rate": "rate of these resumes, % of direct I/O",
    "host_overhead_trimmed_MiB": "host memory left after a resume and trim, MiB",
    "malloc_free_pair_1MiB_ns": "cudaMalloc + cudaFree of 1 MiB under preload, ns",
    "malloc_free_pair_2MiB_ns": "cudaMalloc + cudaFree of 2 MiB under preload, ns",
    "region_bandwidth_resumed": "the same after a pause and a resume, %",
    "fingerprint_rate_GBps": "rate of fingerprints, GB/s",
    "host_machine_paused_MiB": "the same by what the machine has less, MiB",
    "host_machine_trimmed_MiB": "host memory left by what the machine has less, MiB",
    "sglang_release_weights_first_ms": "first release of 16 GB of weights, backed up, ms",
    "sglang_start_s": "start of the engine, s",
    "rl_kv_tokens_fraction_at_once": "the same waking all at once",
    "rl_peak_GiB": "most memory in use in a step, GiB",
    "rl_engine_sleep_ms": "the engine's KV cache, weights and graphs go, ms",
    "rl_trainer_wake_ms": "the trainer's weights and optimizer come back, ms",
    "rl_optimizer_sleep_ms": "the optimizer goes, ms",
    "rl_weights_wake_ms": "the engine's weights and graphs come back, ms",
    "rl_copy_goes_ms": "the trainer's copy of the weights goes, ms",
    "rl_kv_wake_ms": "the KV cache comes back, ms",
    "rl_train_ms": "kernels over the trainer's memory, ms",
    "rl_update_ms": "the engine gets the new weights, ms",
    "rl_generate_ms": "generates 8 x 64 tokens from 1024 each, ms",
}
for _metric, _peer, _words in LINES:
    WORDS.setdefault(_metric, _words.removeprefix("SGLang, 8B: ").removeprefix("RL step, 8B: "))

HEAD = """\
---
hide: [toc]
---
# Measured

<!-- Written by benchmarks/measured_page.py: do not edit. -->

Everything that `benchmarks/results/h200.json` holds, on {gpu}, {dates}
({versions}).
`make bench` measures again, on the machine it runs on.

How to read it: memsaver and the peer of a row took turns in one run, on the same tensors (SGLang
engines: one after the other). Values are medians, with the least and the greatest of the cycles in
parentheses; `ended`: the peer did not get there. `limit` is what the driver's bare calls, a plain
pinned copy, or direct I/O of the same bytes cost in that run. `ratio` is how many times better
memsaver is; memory counts as 1 MiB at least. An absolute time is the figure of one machine. Without
a backup, half a second lies between a pause and its resume, but for "right after": memory that was
freed a moment ago is cleared by the driver first.
"""


def median(value: float, cycles: object) -> str:
    """A value, and the least and the greatest of its cycles, where there are several figures."""
    if not isinstance(cycles, list) or len(cycles) < 2:
        return figure(value)
    return f"{figure(value)} ({figure(min(cycles))} to {figure(max(cycles))})"


def table(rows: list[Mapping[str, Any]]) -> list[str]:
    """The rows of a section as Markdown."""
    lines = [
        "| what | memsaver | peer | its value | limit | ratio |",
        "|---|--:|---|--:|--:|--:|",
    ]
    last = ""
    for row in rows:
        detail = row.get("detail") or {}
        words = WORDS.get(row["metric"], f"`{row['metric']}`")
        cells = [
            words if words != last else "",
            median(row["memsaver"], detail.get("memsaver")) if words != last else "",
            row["peer"],
            "ended" if row["peer_value"] is None else median(row["peer_value"], detail.get("peer")),
            "" if row["limit"] is None else f"{row['limit']:,.1f}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        last = words
    return lines


def growth(limits: Mapping[str, Any]) -> list[str]:
    """How the time per allocation grows with their number."""
    small, large = f"{limits['small']:,}", f"{limits['large']:,}"
    lines = [
        f"Time per allocation of {limits['allocation_bytes']} bytes on the simulated driver: with "
        f"{small} of them, with {large}, and how many times",
        "the latter is the former. `holes`: of twice as many, every other one was freed before.",
        "",
        f"| | backup | holes | {small}, ns | {large}, ns | growth |",
        "|---|---|---|--:|--:|--:|",
    ]
    for row in limits["rows"]:
        holes = "yes" if row["holes"] else "no"
        lines.append(
            f"| {row['step']} | {row['backup']} | {holes} | {row['small_ns']:,.1f} "
            f"| {row['large_ns']:,.1f} | {row['growth']:.2f} |"
        )
    return lines


def reliability(found: Mapping[str, Any]) -> list[str]:
    """What the fault sweep, the sanitizers, the fuzzer and the soak found."""
    faults, soak, checked = found["faults"], found["soak"], found["sanitizers"]
    fuzzed = [found["fuzz"][what] for what in ("abi", "options")]
    failed = sum(one["failed"] for one in fuzzed)
    return [
        f"- **Faults**: {faults['injected']:,} failing calls to the driver and the system in "
        f"{faults['scenarios']} scenarios, on the simulated driver; after {faults['passed']:,} of",
        "  them the error, the contents and what is left were as "
        f"[the design](design.md#faults) says ({faults['failed']} were not). "
        "`make faults ARGS=` does it again.",
        f"- **Sanitizers**: {checked['tests']} tests and {checked['stresses']} runs of a stress "
        f"({checked['operations']:,} operations) under the",
        f"  address, undefined-behaviour and thread sanitizers: {checked['failed']} failed. "
        "`make sanitize` does it again.",
        f"- **Fuzzing**: {fuzzed[0]['inputs']:,} inputs to the C interface and "
        f"{fuzzed[1]['inputs']:,} to the options in {found['fuzz']['seconds']} s, guided by what",
        f"  they reach in the core: {failed} failed. `make fuzz` does it again.",
        f"- **Soak**: {soak['cycles']:,} random steps in {soak['seconds']:.0f} s on "
        f"{soak['device']} with {soak['processes']} processes, contents checked: "
        f"{soak['device_bytes'] / 1e9:,.0f} GB of device memory",
        f"  given back and taken, {soak['copied_bytes'] / 1e9:,.0f} GB copied.",
    ]


def page() -> str:
    """The page, from the result files as they are."""
    rows = json.loads(RESULTS.read_text())
    versions = ", ".join(f"{name} {text}" for name, text in rows[0]["versions"].items())
    gpus = " and ".join(sorted({row["gpu"] for row in rows}))
    lines = [HEAD.format(gpu=gpus, versions=versions, dates=dates(rows))]
    sections: list[list[Mapping[str, Any]]] = [[] for _ in SECTIONS]
    for row in rows:
        fits = (
            i for i, (_, beginnings) in enumerate(SECTIONS) if row["metric"].startswith(beginnings)
        )
        sections[next(fits)].append(row)
    for index in ORDER:
        if sections[index]:
            lines += [f"## {SECTIONS[index][0]}", "", *table(sections[index]), ""]
    lines += ["## Growth", "", *growth(json.loads(LIMITS.read_text())), ""]
    lines += ["## Reliability", "", *reliability(json.loads(RELIABILITY.read_text()))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes, or checks."""
    wanted = page()
    if "--check" in sys.argv:
        there = PAGE.read_text() if PAGE.exists() else ""
        sys.exit(0 if wanted == there else "docs/measured.md: run benchmarks/measured_page.py")
    Path(PAGE).write_text(wanted)


if __name__ == "__main__":
    main()
