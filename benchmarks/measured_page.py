"""Write docs/measured.md, the page of measurements, from benchmarks/results.

usage: measured_page.py     writes docs/measured.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import report
import results
from readme_table import ENGINES_ON_TWO, RESULTS, ROOT, dates, figure

PAGE = ROOT / "docs" / "measured.md"
LIMITS = RESULTS.with_name("limits.json")
RELIABILITY = RESULTS.with_name("reliability.json")
ON_H100 = RESULTS.with_name("h100.json")
PAIRED = RESULTS.with_name("paired.json")

# Prefixes of metrics, by section. A metric belongs to the first section that matches.
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Swaps", ("swap_",)),
    ("Without a backup", ("kv_", "discarded_", "many_")),
    ("Backed up to the host", ("backed_", "lora_", "two_gpu_")),
    ("Backed up to another GPU", ("peer_",)),
    ("Sent to another process", ("share_", "update_from_region_", "take_over_")),
    ("Backed up to disk", ("disk_",)),
    ("Host memory", ("host_",)),
    ("SGLang, an 8B model", ("sglang_",)),
    ("vLLM, an 8B model", ("vllm_",)),
    ("A step of RL, an 8B model", ("rl_",)),
    ("Steps of verl's GRPO trainer, a 1.4B model", ("verl_",)),
    ("Cost of an active region", ("region_", "malloc_")),
    ("Training frameworks", ("trl_", "trainer_")),
    ("Others", ("",)),
)
ORDER = (1, 2, 0, 3, 4, 5, 6, 7, 8, 9, 10, 12, 11, 13)

# The titles of the rows.
KV_WORDS = {
    "pause_at_once": "pause {} GiB right after its resume, ms",
    "resume_at_once": "resume {} GiB right after its pause, ms",
    "pause": "pause {} GiB, no backup, ms",
    "resume": "resume {} GiB, no backup, ms",
}

WORDS = {
    **dict(ENGINES_ON_TWO),
    **{
        f"kv_{gib}GiB_{call}_ms": words.format(gib)
        for gib in (56, 64)
        for call, words in KV_WORDS.items()
    },
    "sglang_resume_tp2_ms": "resume of all tags on two GPUs, ms",
    "sglang_resume_tp2_64_ctas_ms": "resume of all tags on two GPUs with NCCL_MAX_CTAS=64, ms",
    "sglang_resume_tp2_8_ctas_ms": "resume of all tags on two GPUs with NCCL_MAX_CTAS=8, ms",
    "discarded_16GB_pause_at_once_ms": "pause 16 GB in 195 tensors right after its resume, ms",
    "discarded_16GB_resume_at_once_ms": "resume 16 GB in 195 tensors right after its pause, ms",
    "many_10k_pause_at_once_ms": "pause 10,000 allocations right after their resume, ms",
    "many_10k_resume_at_once_ms": "resume 10,000 allocations right after their pause, ms",
    "backed_changed_pause_ms": "later pauses of 16 GB, all contents changed, ms",
    "backed_unchanged_resume_ms": "resume of 16 GB from the host after an unchanged pause, ms",
    "discarded_16GB_pause_ms": "pause 16 GB in 195 tensors, no backup, ms",
    "discarded_16GB_resume_ms": "resume 16 GB in 195 tensors, no backup, ms",
    "swap_64GiB_ms": "swap 64 GiB for 64 GiB right after the last swap, no backup, ms",
    "swap_64GiB_spaced_ms": "the same, but half a second after the last swap, ms",
    "swap_32GiB_ms": "swap 32 GiB for 32 GiB right after the other build's swap, no backup, ms",
    "swap_32GiB_spaced_ms": "swap 32 GiB for 32 GiB after a wait, no backup, ms",
    "swap_16GB_ms": "swap 16 GB for 16 GB, backed up to the host, ms",
    "backed_changed_pause_rate": "rate of these pauses, % of a plain copy",
    "backed_changed_resume_rate": "rate of these resumes, % of a plain copy",
    "lora_pause_ms": "pause of 16 GB, 1 % of the tensors changed, ms",
    "lora_resume_ms": "resume of 16 GB, 1 % of the tensors changed, ms",
    "two_gpu_backed_pause_ms": "pause of 16 GB on each of two GPUs, ms",
    "two_gpu_backed_resume_ms": "resume of 16 GB on each of two GPUs, ms",
    "peer_pause_16GB_ms": "later pauses of 16 GB, all contents changed, ms",
    "peer_resume_16GB_ms": "resume of 16 GB from the other GPU, ms",
    "share_16GB_ms": "16 GB sent from a region, until another process has read it, ms",
    "share_195_tensors_ms": "the same for 16 GB in 195 tensors, ms",
    "update_from_region_ms": "update of an engine's 16 GB of weights from a trainer's region, ms",
    "take_over_16GB_ms": "16 GB of a trainer's pages mapped for a mapped engine by "
    "bare driver calls, and new pages for the trainer, ms",
    "take_over_asleep_16GB_ms": "16 GB of a trainer's pages mapped for a paused engine by "
    "bare driver calls, and the trainer's pause, ms",
    "disk_pause_rate": "rate of these pauses, % of direct I/O",
    "disk_resume_rate": "rate of these resumes, % of direct I/O",
    "host_overhead_trimmed_MiB": "host memory left after a resume and trim, MiB",
    "malloc_free_pair_1MiB_ns": "cudaMalloc + cudaFree of 1 MiB under preload, ns",
    "malloc_free_pair_2MiB_ns": "cudaMalloc + cudaFree of 2 MiB under preload, ns",
    "region_bandwidth_resumed": "the same after a pause and a resume, %",
    "fingerprint_rate_GBps": "rate of fingerprints, GB/s",
    "host_machine_paused_MiB": "the same, measured as the machine's decrease in free memory, MiB",
    "host_machine_trimmed_MiB": "host memory left, as the machine's decrease in free memory, MiB",
    "sglang_release_weights_first_ms": "first release of 16 GB of weights, backed up, ms",
    "sglang_start_s": "start of the engine, s",
    "rl_kv_tokens_fraction_at_once": "the same waking all at once",
    "rl_step_overhead_seconds": "duration of a step beyond its training, update and generation, s",
    "rl_peak_GiB": "peak memory in use in a step, GiB",
    "rl_engine_sleep_ms": "pause of the engine's KV cache, weights and graphs, ms",
    "rl_trainer_wake_ms": "resume of the trainer's weights and optimizer, ms",
    "rl_optimizer_sleep_ms": "pause of the optimizer, ms",
    "rl_weights_wake_ms": "resume of the engine's weights and graphs, ms",
    "rl_copy_goes_ms": "pause of the trainer's copy of the weights, ms",
    "rl_kv_wake_ms": "resume of the KV cache, ms",
    "rl_train_ms": "kernels on the trainer's memory, ms",
    "rl_update_ms": "update of the engine's weights, ms",
    "rl_generate_ms": "generation of 8 x 64 tokens from prompts of 1024, ms",
    "sglang_release_weights_ms": "release 16 GB of new weights, backed up, ms",
    "sglang_release_weights_unchanged_ms": "the same, weights unchanged, ms",
    "sglang_resume_weights_ms": "resume the weights, ms",
    "sglang_release_kv_ms": "release the KV cache, ms",
    "sglang_resume_kv_ms": "resume the KV cache, ms",
    "sglang_decode_tokens_per_s": "decoding of 8 sequences, tokens/s",
    "sglang_switch_ms": "release of one model and wake-up of another, up to the first token, ms",
    "sglang_switch_peer_ms": "switch from one SGLang engine to another, backups on another GPU, ms",
    "sglang_resident_tp2_MiB": "memory in use on one of two GPUs, all tags released, MiB",
    "sglang_resident_tp2_64_ctas_MiB": "memory in use on one of two GPUs, NCCL_MAX_CTAS=64, MiB",
    "sglang_resident_tp2_8_ctas_MiB": "memory in use on one of two GPUs, NCCL_MAX_CTAS=8, MiB",
    "sglang_storm_answered_requests": "answered requests; the engine sleeps and wakes 100 times",
    "sglang_resident_MiB": "memory in use, all tags released, MiB",
    "sglang_max_mem_fraction": "largest mem_fraction_static beside a trainer",
    "vllm_sleep_first_ms": "first sleep at level 1: 16 GB of weights, backed up, ms",
    "vllm_sleep_changed_ms": "the same later, all weights changed, ms",
    "vllm_sleep_unchanged_ms": "the same, weights unchanged, ms",
    "vllm_wake_weights_ms": "wake the weights, ms",
    "vllm_wake_kv_ms": "wake the KV cache, ms",
    "vllm_decode_tokens_per_s": "decoding of 8 sequences, tokens/s",
    "vllm_resident_MiB": "memory in use, asleep, MiB",
    "trl_sleep_wake_seconds": "TRL: the engine's first sleep and wake-up, s",
    "trl_sleep_wake_later_seconds": "TRL: its later sleeps and wake-ups, s",
    "trl_step_seconds": "TRL: a training step, s",
    "trl_peak_MiB": "TRL: peak memory in use, MiB",
    "trainer_transition_seconds": "transformers: all releases and restores of a step, s",
    "trainer_step_seconds": "transformers: a training step, s",
    "trainer_asleep_MiB": "transformers: memory in use between steps, MiB",
    "trainer_peak_MiB": "transformers: peak memory in use, MiB",
    "verl_sleep_wake_seconds": "verl: release and both resumes of the engine, s",
    "verl_step_seconds": "verl: a step, s",
    "verl_update_weights_seconds": "verl: update of the weights with both resumes, s",
    "verl_peak_MiB": "verl: peak memory in use, MiB",
    "verl_kv_tokens": "verl: KV tokens at gpu_memory_utilization 0.5",
    "verl_max_fraction": "verl: largest gpu_memory_utilization that worked, of those tried",
    "verl_max_kv_tokens": "verl: KV tokens at that gpu_memory_utilization",
    "verl_cycles_change_MiB": "verl: change of the memory in use asleep, 50 steps, MiB",
    "verl_left_MiB": "verl: memory left in use by trainers that Ctrl-C or an error ended, MiB",
    "verl_tp2_sleep_wake_seconds": "verl, two GPUs: release and both resumes of the engine, s",
    "verl_tp2_step_seconds": "verl, two GPUs: a step, s",
    "verl_tp2_update_weights_seconds": "verl, two GPUs: update of the weights with both resumes, s",
    "verl_tp2_peak_MiB": "verl, two GPUs: peak memory in use on the first, MiB",
    "verl_tp2_kv_tokens": "verl, two GPUs: KV tokens at gpu_memory_utilization 0.5",
    "rl_transition_seconds": "all transitions of engine and trainer, s",
    "rl_kv_tokens_fraction": "KV tokens beside a trainer, waking in stages",
    "many_10k_pause_ms": "pause 10,000 allocations of 2 MiB, ms",
    "many_10k_resume_ms": "resume 10,000 allocations of 2 MiB, ms",
    "backed_first_pause_ms": "first pause of 16 GB, backed up to the host, ms",
    "backed_changed_resume_ms": "resumes of 16 GB from the host, ms",
    "backed_unchanged_pause_ms": "pauses of 16 GB, nothing changed, ms",
    "disk_pause_ms": "pause of 8 GB, backed up to disk, ms",
    "disk_resume_ms": "resume of 8 GB from disk, not cached, ms",
    "host_overhead_paused_MiB": "host memory in addition to a backup of 16 GB, MiB",
    "region_bandwidth": "device copy in region memory, % of plain memory",
    "malloc_free_pair_512B_ns": "cudaMalloc + cudaFree of 512 B under preload, ns",
}

# The page's names for steps that have different names in the results of limits.py.
STEPS = {
    "free, mixed": "free, random order",
    "look at a backup, in order": "view a backup, in order",
    "look at a backup, mixed": "view a backup, random order",
    "whose is it, mixed": "look up the owner, random order",
}

HEAD = """\
---
hide: [toc]
---
# Measured

<!-- Written by benchmarks/measured_page.py: do not edit. -->

This page contains all measurements of `benchmarks/results/h200.json`, on {gpu}, {dates}
({versions}).
`make bench` repeats them on your machine.

In each row, memsaver and the peer alternated in one run, on the same tensors (engines ran one after
the other, except for SGLang's decoding against an engine without a memory saver). A value with
parentheses is the median of several cycles, followed by their minimum and maximum; any other value
was measured once, or its cycles are not in the file. `ended` means that the peer ended before the
measurement. `limit` is the time of the driver's bare calls, of a plain copy (with pinned memory, or
between GPUs), or of direct I/O of the same bytes, in the same run. `ratio` is the factor by which
memsaver is better; for this ratio, memory below 1 MiB counts as 1 MiB. Absolute times apply to one
machine only. Without a backup, each resume starts half a second after its pause, when the driver
has cleared the freed memory; rows with "right after" omit this wait.

`retained backup` is torch_memory_saver's setting `retain_cpu_backup=True`, which keeps a backup's
pinned host memory for the next pause; by default, each resume releases it. Notes on some rows:

- Single cycles took up to twice the median, for bare driver calls as well as for both libraries.
- From the first resume on, memsaver makes fewer driver calls for 64 GiB in 1 GiB tensors.
- Pauses of two GPUs at the same time take 7 % longer than a pause of one GPU; repeated plain copies
  of both GPUs, through 1 GiB of host memory each, take hardly any longer.
- In an RL step, one side wakes right after the other side's pause, when the driver must first clear
  the memory. This probably explains why memsaver is 5 % slower there than retained backups.
- The disk was the machine's virtual disk; the measurement of the direct I/O limit writes a newly
  allocated file each time, as memsaver's first pause does.
- SGLang's memory in use with all tags released has two values: that of an engine's first sleep,
  and half of the memory in use while two engines sleep (each for the seventh time, with
  torch_memory_saver for the third or fourth).
- The results were written by the programs of `benchmarks/`; the file has the single cycles (except
  for `cudaMalloc`) and the commit.
- `benchmarks/results/h200_0.2.0.json` is a shorter run of memsaver 0.2.0 without a backup. On that
  machine, the driver calls of both libraries were either fast or slow: bare calls unmapped 64 GiB
  in 21 to 24 ms or in 41 to 46 ms. The medians depend on how many cycles of each library were slow,
  so they are not shown here.
"""


def value_and_range(value: float, metric: str, cycles: object) -> str:
    """Return a value, followed by the range of its cycles if there are several."""
    shown = figure(value, metric)
    if not isinstance(cycles, list) or len(cycles) < 2:
        return shown
    return f"{shown} ({figure(min(cycles), metric)} to {figure(max(cycles), metric)})"


def table(rows: list[Mapping[str, Any]]) -> list[str]:
    """Return the rows of a section as Markdown."""
    lines = [
        "| what | memsaver | peer | its value | limit | ratio |",
        "|---|--:|---|--:|--:|--:|",
    ]
    last: tuple[str, float | None] = ("", None)
    for row in rows:
        detail = row.get("detail") or {}
        cycles = detail.get("memsaver")
        words = WORDS.get(row["metric"], f"`{row['metric']}`")
        cells = [
            words if words != last[0] else "",
            ""
            if (words, row["memsaver"]) == last
            else value_and_range(row["memsaver"], row["metric"], cycles),
            row["peer"],
            "ended"
            if row["peer_value"] is None
            else value_and_range(row["peer_value"], row["metric"], detail.get("peer")),
            "" if row["limit"] is None else f"{row['limit']:,.1f}",
            "" if row["ratio"] is None else f"{row['ratio']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        last = words, row["memsaver"]
    return lines


def growth(limits: Mapping[str, Any]) -> list[str]:
    """Return a table of the time per allocation for small and large tags."""
    small, large = f"{limits['small']:,}", f"{limits['large']:,}"
    lines = [
        f"Time per allocation of {limits['allocation_bytes']} bytes on the simulated driver, with "
        f"{small} and with {large} allocations;",
        "`growth` is the ratio of the two. With `holes`, twice as many were allocated, and every "
        "other one was freed first.",
        "",
        f"| | backup | holes | {small}, ns | {large}, ns | growth |",
        "|---|---|---|--:|--:|--:|",
    ]
    for row in limits["rows"]:
        step, holes = STEPS.get(row["step"], row["step"]), "yes" if row["holes"] else "no"
        lines.append(
            f"| {step} | {row['backup']} | {holes} | {row['small_ns']:,.1f} "
            f"| {row['large_ns']:,.1f} | {row['growth']:.2f} |"
        )
    return lines


def reliability(found: Mapping[str, Any]) -> list[str]:
    """Return the results of the fault sweep, the sanitizers, the fuzzer and the soak test."""
    faults, soak, checked = found["faults"], found["soak"], found["sanitizers"]
    fuzzed = [found["fuzz"][what] for what in ("abi", "options")]
    failed = sum(one["failed"] for one in fuzzed)
    ran = {what: found[what]["date"][:10] for what in ("faults", "sanitizers", "fuzz", "soak")}
    return [
        "Each item is one run, on the date in parentheses. The numbers of calls and tests change "
        "with memsaver.",
        "",
        f"- **Faults** ({ran['faults']}): "
        f"{faults['injected']:,} calls to the driver and the system were made to "
        f"fail in {faults['scenarios']} scenarios, on the simulated",
        "  driver. The error, the contents and the remaining objects were as "
        "[the design](design.md#faults) requires after",
        f"  {faults['passed']:,} of these failures; {faults['failed']} violated this. "
        "`make faults ARGS=` repeats the test.",
        f"- **Sanitizers** ({ran['sanitizers']}): "
        f"{checked['tests']} tests, {checked['faults']:,} failing calls and "
        f"{checked['stresses']} runs of a stress test ({checked['operations']:,} operations) "
        "under the",
        f"  address, undefined-behaviour and thread sanitizers: {checked['failed']} failed. "
        "`make sanitize` repeats them.",
        f"- **Fuzzing** ({ran['fuzz']}): "
        f"{fuzzed[0]['inputs']:,} inputs to the C interface and "
        f"{fuzzed[1]['inputs']:,} to the options in {found['fuzz']['seconds']} s, guided by their",
        f"  coverage of the core: {failed} failed. `make fuzz` starts a new run.",
        f"- **Soak** ({ran['soak']}): "
        f"{soak['cycles']:,} random steps in {soak['seconds']:.0f} s on "
        f"{soak['device']} with {soak['processes']} processes released and mapped "
        f"{soak['device_bytes'] / 1e9:,.0f} GB of device",
        f"  memory and copied {soak['copied_bytes'] / 1e9:,.0f} GB; the contents were checked.",
    ]


def on_h100(rows: list[Mapping[str, Any]]) -> list[str]:
    """Return the rows that were measured on H100 GPUs."""
    gpus = " and ".join(sorted({row["gpu"] for row in rows}))
    return [
        f"All measurements of `benchmarks/results/h100.json`, on {gpus}, {dates(rows)}.",
        "The measurements with one GPU ran while other programs used the machine's other GPUs.",
        "",
        *table(rows),
    ]


def before_and_after(rows: list[Mapping[str, Any]]) -> list[str]:
    """Return the rows of paired.py, which compares two builds of memsaver."""
    gpus = " and ".join(sorted({row["gpu"] for row in rows}))
    lines = [
        f"All measurements of `benchmarks/results/{PAIRED.name}`, on {gpus}, {dates(rows)}.",
        "Both builds took turns on one machine (`benchmarks/paired.py`). `before/after` is the "
        "ratio of trimmed means, which leave out a fifth of the cycles at each end; above 1, the "
        "later build is faster. ± is its standard error, with each cycle counted as independent. "
        "`driver` is the time of bare driver calls or of a plain copy in the same run. The other "
        f"measurements of `benchmarks/results/{RESULTS.name}` were not made in pairs.",
        "",
        "| measurement | builds | before | after | before/after | driver |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        detail = row["detail"]
        cells = [
            WORDS.get(row["metric"], f"`{row['metric']}`"),
            f"{row['peer'].rpartition(' ')[2]}, {row['commit'][:7]}",
            value_and_range(row["peer_value"], row["metric"], detail["peer"]),
            value_and_range(row["memsaver"], row["metric"], detail["memsaver"]),
            f"{row['ratio']:.2f} ± {row['ratio'] * detail['standard_error']:.2f}",
            "" if row["limit"] is None else f"{row['limit']:,.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *slower(rows)]


def slower(rows: list[Mapping[str, Any]]) -> list[str]:
    """Return the sentences that name the measurements in which the later build is too slow."""
    missed = [row for row in rows if report.verdict(row, rows) == "not met"]
    surely = [row for row in missed if _is_surely_slower(row)]
    titles = (WORDS.get(row["metric"], row["metric"]).removesuffix(", ms") for row in missed)
    return [
        "The later build may be at most 3 % slower, or 10 % if the earlier build takes less than "
        f"{report.SHORT_MS:g} ms. {len(missed)} of {len(rows)} measurements exceed this limit"
        + (f" ({'; '.join(titles)})" if missed else "")
        + f", {len(surely) or 'none'} of them by more than two standard errors."
    ]


def _is_surely_slower(row: Mapping[str, Any]) -> bool:
    wanted = report.goal(row)
    assert wanted is not None and wanted.ratio is not None
    return bool(row["ratio"] * (1 + 2 * row["detail"]["standard_error"]) < wanted.ratio)


def page() -> str:
    """Return the text of the page, generated from the current result files."""
    rows = json.loads(RESULTS.read_text())
    first = {row["metric"]: at for at, row in reversed([*enumerate(rows)])}
    rows.sort(key=lambda row: first[row["metric"]])  # `table` merges only adjacent rows
    gpus = " and ".join(sorted({row["gpu"] for row in rows}))
    lines = [HEAD.format(gpu=gpus, versions=results.versions_text(rows), dates=dates(rows))]
    sections: list[list[Mapping[str, Any]]] = [[] for _ in SECTIONS]
    for row in rows:
        fits = (
            i for i, (_, beginnings) in enumerate(SECTIONS) if row["metric"].startswith(beginnings)
        )
        sections[next(fits)].append(row)
    for index in ORDER:
        if sections[index]:
            lines += [f"## {SECTIONS[index][0]}", "", *table(sections[index]), ""]
    lines += ["## On H100s", "", *on_h100(json.loads(ON_H100.read_text())), ""]
    if PAIRED.exists():
        paired = json.loads(PAIRED.read_text())
        lines += ["## An earlier and a later build", "", *before_and_after(paired), ""]
    lines += ["## Growth", "", *growth(json.loads(LIMITS.read_text())), ""]
    lines += ["## Reliability", "", *reliability(json.loads(RELIABILITY.read_text()))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
