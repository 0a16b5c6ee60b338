"""Measure release and resume of each tag of an SGLang engine, with decoding before and after.

The engines use the GPU one after the other. Each engine runs one cycle with the loaded weights.
Further cycles alternate between unchanged weights and new weights from a trainer. The engine's own
checksum of its weights before each release is compared with the checksum after the resume.
Measurements before an engine's failure are valid, unless the engine lost contents.
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
from engine_process import say
from libraries import DEFAULT, OURS, PEERS
from sglang_engine import BENCH, GRAPH, KV_CACHE, WEIGHTS, EngineWorker, running

FRACTION = 0.75  # leaves room for a trainer's copy of the weights
REQUESTS, PROMPT, TOKENS = 8, 64, 256

# Suffixes of the metric for releasing the weights, by the kind of cycle.
SUFFIXES = {"first": "_first", "changed": "", "unchanged": "_unchanged"}

Found = dict[str, list[float]]  # by metric, without "sglang_"


class Cycling(EngineWorker):
    """A worker that releases and resumes tags, and decodes."""

    def decode(self, times: int) -> dict[str, Any]:
        """Return the tokens per second of `times` batches, after one uncounted batch."""
        starts = [10 + number * PROMPT for number in range(REQUESTS)]
        prompts = [list(range(start, start + PROMPT)) for start in starts]
        rates = []
        for _ in range(times + 1):
            self.engine.flush_cache()
            begin = time.perf_counter()
            tokens = self.generate(prompts, TOKENS)
            rates.append(round(tokens / (time.perf_counter() - begin), 2))
        return {"tokens_per_s": rates[1:]}

    def cycle(self, seed: int | None) -> dict[str, Any]:
        """Run a cycle, with new weights if a seed is given.

        Returns the duration of each step in milliseconds. In the result, "lost" explains why the
        weights count as lost, and "unchecked" explains why the weights were not compared.
        """
        self.rest()
        before, problem = self.checksum()
        if seed is not None:
            old = before
            self.trainer.take(seed)
            self.update()
            self.trainer.drop()
            before, problem = self.checksum()
            if before and before == old:
                raise RuntimeError("the update did not change the weights")
            self.rest()
        found: dict[str, Any] = {"release_kv": self.release_ms(KV_CACHE)}
        self.rest()
        found["release_weights"] = self.release_ms(WEIGHTS)
        found["release_graph"] = self.release_ms(GRAPH)
        self.rest()
        found["resume_graph"] = self.resume_ms(GRAPH)
        found["resume_weights"] = self.resume_ms(WEIGHTS)
        self.rest()
        found["resume_kv"] = self.resume_ms(KV_CACHE)
        after, problem = self.checksum() if before else (before, problem)
        lost = "" if before == after else f"the weights have changed: {problem or after}"
        return {"times": found, "lost": lost, "unchecked": problem}


def kinds(cycles: int) -> Iterator[tuple[str, int | None]]:
    """Yield the kind of each cycle, and the seed of its new weights, if any."""
    yield "first", None
    for seed in range(1, cycles + 1):
        yield "unchanged", None
        yield "changed", seed


def measure_one(name: str, options: argparse.Namespace, failures: list[str]) -> Found:
    """Measure one library until a failure; return no values if contents were lost."""
    found: Found = {}
    worker = f"{__name__}:Cycling"
    with (
        attempt(failures),
        running(worker, name, options, fraction=FRACTION, backup=True) as (child, started),
    ):
        add(found, "start_s", started["seconds"])
        decode(child, "decode_before", options, found)
        reported = False
        for kind, seed in kinds(options.cycles):
            reply = child.ask("cycle", seed=seed)
            times = reply["times"]
            say(f"{name}: {kind}: {', '.join(f'{key} {value}' for key, value in times.items())}")
            if reply["lost"]:
                failures.append(f"{name}, {kind}: {reply['lost']}")
                return {}
            if reply["unchecked"] and not reported:
                failures.append(f"{name}: contents were not compared: {reply['unchecked']}")
                reported = True
            add(found, f"release_weights{SUFFIXES[kind]}_ms", times["release_weights"])
            for step in ("resume_weights", "release_kv", "resume_kv"):
                add(found, f"{step}_ms", times[step])
        decode(child, "decode_after", options, found)
    return found


def add(found: Found, metric: str, *values: float) -> None:
    """Add values to a metric."""
    found.setdefault(metric, []).extend(values)


def decode(child: Child, metric: str, options: argparse.Namespace, found: Found) -> None:
    """Measure decoding."""
    add(found, metric, *child.ask("decode", times=options.decodes)["tokens_per_s"])
    say(f"{child.name}: {metric}: {statistics.median(found[metric]):.0f} tokens/s")


def rows(found: Mapping[str, Found]) -> Iterator[dict[str, Any]]:
    """Yield a row for each metric that both libraries have; print those that only memsaver has."""
    ours = found.get(OURS, {})
    theirs = found.get(DEFAULT, {})
    for metric in (
        "release_weights_first_ms",
        "release_weights_ms",
        "release_weights_unchanged_ms",
        "resume_weights_ms",
        "release_kv_ms",
        "resume_kv_ms",
        "start_s",
    ):
        if metric in ours and metric in theirs:
            yield results.measurement(
                f"sglang_{metric}", ours[metric], PEERS[DEFAULT], theirs[metric], bench=BENCH
            )
        elif metric in ours:
            comparison.show(f"sglang_{metric}", ours[metric])
    yield from decode_row(ours, theirs)


def decode_row(ours: Found, theirs: Found) -> Iterator[dict[str, Any]]:
    """Yield the row for decoding before the first release and after the last resume, combined."""
    metric, parts = "sglang_decode_tokens_per_s", ("decode_before", "decode_after")
    values = [[value for part in parts for value in one.get(part, [])] for one in (ours, theirs)]
    if all(values):
        row = results.measurement(
            metric, values[0], PEERS[DEFAULT], values[1], bench=BENCH, higher_is_better=True
        )
        row["detail"] = {
            who: {part.removeprefix("decode_"): one.get(part, []) for part in parts}
            for who, one in (("memsaver", ours), ("peer", theirs))
        }
        yield row
    elif values[0]:
        comparison.show(metric, values[0])


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for releases, resumes, starts and decoding."""
    if options.touch_gib:
        say(host_memory.touch_elsewhere(int(options.touch_gib * host_memory.GIB)))
    found: dict[str, Found] = {}
    if not options.compiled:
        say("the first engine compiles kernels; it is not measured")
        with running(f"{__name__}:Cycling", OURS, options, fraction=FRACTION, backup=False):
            pass
    for name in (OURS, *([DEFAULT] if options.peer else ())):
        found[name] = measure_one(name, options, failures)
    yield from rows(found)
