"""Measure sleep and wake-up of a vLLM engine, with decoding before and after.

The engines use the GPU one after the other. Each engine runs one cycle with the initial weights.
Further cycles alternate between unchanged and changed weights. The checksums of the weights and the
output before each sleep are compared with those after the wake-up. Measurements before an engine's
failure are valid, unless the engine lost contents. The limit is the time of bare driver calls and
plain copies for the same number of bytes (engine_limits.py). The limit is measured only for one
GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import comparison
import host_memory
import results
from children import Child, attempt
from engine_process import running, say
from libraries import OURS
from raw_driver import LIMIT
from vllm_engine import BENCH, PEER, THEIRS, engine_process, prefix

FRACTION = 0.5  # of the GPU's memory
STEPS = {"wake_weights": "wake_weights_ms", "wake_kv": "wake_kv_ms", "resident": "resident_MiB"}
METRICS = (
    "sleep_first_ms",
    "sleep_changed_ms",
    "sleep_unchanged_ms",
    "wake_weights_ms",
    "wake_kv_ms",
    "resident_MiB",
    "decode_tokens_per_s",
)

LIMITS = "parts.engine_limits:Limits"
LIMITING_CYCLES = 6

Found = dict[str, list[float]]  # by metric, without the prefix


def kinds(cycles: int) -> Iterator[str]:
    """Yield the kind of each cycle."""
    yield "first"
    for _ in range(cycles):
        yield from ("unchanged", "changed")


def measure_one(
    name: str, options: argparse.Namespace, failures: list[str], end: float, sizes: dict[str, int]
) -> Found:
    """Measure one allocator until a failure or `end`; return nothing if contents were lost.

    `end` is a value of `time.monotonic()`. After this time, only the first cycle of each kind can
    begin. Adds the bytes of memsaver's tags to `sizes`.
    """
    found: Found = {}
    with (
        attempt(failures),
        running(lambda: engine_process(name, options, FRACTION), options) as (child, _),
    ):
        decode(child, options, found)
        if name == OURS:
            sizes.update(child.ask("tag_bytes"))
        for kind in kinds(options.cycles):
            metric = f"sleep_{kind}_ms"
            if metric in found and time.monotonic() > end:
                say(f"{name}: no time is left for further cycles")
                break
            reply = child.ask("cycle", change=kind == "changed")
            times = reply["times"]
            say(f"{name}: {kind}: {', '.join(f'{key} {value}' for key, value in times.items())}")
            if reply["lost"]:
                failures.append(f"{name}, {kind}: {reply['lost']}")
                return {}
            found.setdefault(metric, []).append(times["sleep"])
            for step, of_step in STEPS.items():
                found.setdefault(of_step, []).append(times[step])
        decode(child, options, found)
    return found


def decode(child: Child, options: argparse.Namespace, found: Found) -> None:
    """Measure decoding."""
    rates = child.ask("decode", times=options.decodes)["tokens_per_s"]
    say(f"{child.name}: {statistics.median(rates):.1f} tokens/s")
    found.setdefault("decode_tokens_per_s", []).extend(rates)


def limits(options: argparse.Namespace, failures: list[str], sizes: Mapping[str, int]) -> Found:
    """Return the durations of bare driver calls and plain copies for the tags' sizes."""
    found: Found = {}
    with attempt(failures), Child(LIMITS, LIMIT, wait=options.wait, **sizes) as child:
        for _ in range(LIMITING_CYCLES):
            for metric, ms in child.ask("cycle").items():
                found.setdefault(metric, []).append(ms)
    return found


def rows(found: Mapping[str, Found], start: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each metric that both allocators have; print those that only memsaver has."""
    ours, theirs = (found.get(name, {}) for name in (OURS, THEIRS))
    for metric in METRICS:
        if metric in ours and metric in theirs:
            yield results.measurement(
                start + metric,
                ours[metric],
                PEER,
                theirs[metric],
                found.get(LIMIT, {}).get(metric),
                bench=BENCH,
                higher_is_better=metric.endswith("tokens_per_s"),
            )
        elif metric in ours:
            comparison.show(start + metric, ours[metric])


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for vllm_*, or for vllm_tp2_* with an engine on two GPUs."""
    if options.touch_gib:
        say(host_memory.touch_elsewhere(int(options.touch_gib * host_memory.GIB)))
    names = (OURS, THEIRS) if options.peer else (OURS,)
    begin = time.monotonic()
    found: dict[str, Found] = {}
    sizes: dict[str, int] = {}
    for number, name in enumerate(names, 1):
        end = begin + options.seconds * number / len(names)
        found[name] = measure_one(name, options, failures, end, sizes)
    if sizes and options.gpus == 1:
        found[LIMIT] = limits(options, failures, sizes)
    yield from rows(found, prefix(options))
