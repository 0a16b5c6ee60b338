"""Measure how two SGLang engines take turns on one GPU.

Each engine's memory fills most of the GPU, so only one engine can be awake. A switch begins with a
request to the sleeping engine. The other engine releases all of its memory, and the sleeping engine
wakes up and generates. The switch ends when the awakened engine has generated its first token. The
weights have backups in host memory.

memsaver's engines wake up by themselves (MEMSAVER_SGLANG_ASLEEP=wake). torch_memory_saver's engines
are resumed through SGLang. The first switch to each engine is not counted, because memory for
backups is allocated during it. "A new engine" is the time that a new engine with the same model
takes to start and generate its first token, with kernels already compiled and no weights to read.
This time includes neither the start of the process nor its imports.

The output of a greedy generation after each switch must equal the engine's first output. If
memsaver's outputs differ, memsaver gets no row. If the other library's outputs differ, its times
are still valid, and the row's details contain a note.

The memory that a sleeping engine still uses is measured before the second engine starts.

`measure_neighbour` compares switches in two configurations of memsaver: backups on another GPU
(MEMSAVER_SGLANG_BACKUP=peer) and backups in host memory. Backups that do not fit on the other GPU
are stored in host memory. `measure_neighbour` therefore fails if the other GPU's memory use does
not grow by the size of the backups.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any

import host_memory
import results
from children import Child, attempt
from engine_model import BIG, SMALL, checkpoint
from engine_process import begin, say, used_mib, wait_until_free
from libraries import DEFAULT, OURS, PEERS
from raw_driver import count_gpus
from sglang_engine import BENCH, EngineWorker, engine_process

METRIC = "sglang_switch_ms"
RESIDENT = "sglang_resident_MiB"
NEIGHBOUR = "sglang_switch_peer_ms"
NEW = "a new engine"
HOST = "memsaver, backups in host memory"
FRACTION = 0.75
TOKENS = 16
WAKE = {"MEMSAVER_SGLANG_ASLEEP": "wake"}
SWITCHES = {OURS: 10, DEFAULT: 3}  # a switch of the latter takes seconds

Found = dict[str, list[Any]]


class Switching(EngineWorker):
    """A worker that releases all memory of its engine, and generates tokens."""

    def start(self) -> dict[str, Any]:
        """Start the engine, record its output, and also return the time to first token, in ms."""
        found = super().start()
        self.engine.flush_cache()
        self._first_token()  # may compile a kernel
        self.engine.flush_cache()
        milliseconds, self._expected = self._first_token()
        return found | {"first_token": milliseconds}

    def release(self) -> dict[str, Any]:
        """Release all memory; return each rank's memory in use, if the saver reports it."""
        answers = self.engine.release_memory_occupation()
        return {"held": [dict(rank.held) for answer in answers or () for rank in answer.ranks]}

    def generate_first(self, resume: bool) -> dict[str, Any]:
        """Generate; return the duration of the resume and the time to the first token, in ms.

        Args:
            resume: whether to resume all memory first; otherwise the request wakes the engine.
        """
        begin = time.perf_counter()
        if resume:
            self.engine.resume_memory_occupation()
        resumed = time.perf_counter() - begin
        milliseconds, output = self._first_token()
        lost = "" if output == self._expected else f"{output} instead of {self._expected}"
        resumed_ms = round(resumed * 1e3, 3)
        return {"resume": resumed_ms, "first_token": resumed_ms + milliseconds, "lost": lost}

    def _first_token(self) -> tuple[float, list[int]]:
        """Return the milliseconds to the first token, and all tokens."""
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        prompt = list(range(100, 164))
        begin = time.perf_counter()
        chunks = iter(self.engine.generate(input_ids=prompt, sampling_params=sampling, stream=True))
        tokens = list(next(chunks)["output_ids"])
        milliseconds = round((time.perf_counter() - begin) * 1e3, 3)
        for chunk in chunks:
            tokens = list(chunk["output_ids"])  # each chunk repeats the earlier tokens
        return milliseconds, tokens


def measure_one(
    name: str, options: argparse.Namespace, failures: list[str], place: str = "host"
) -> Found:
    """Measure one memory saver until a failure, with backups in "host" or "peer" memory."""
    found: Found = {
        name: [] for name in ("switch", "new", "asleep_MiB", "neighbour_MiB", "held", "lost")
    }
    wait_until_free(options.idle_mib)
    variables = WAKE | {"MEMSAVER_SGLANG_BACKUP": place} if name == OURS else {}
    settings: dict[str, Any] = {"fraction": FRACTION, "backup": True, "variables": variables}
    worker = f"{__name__}:Switching"
    with (
        attempt(failures),
        engine_process(worker, name, options, **settings) as first,
        engine_process(worker, name, options, **settings) as second,
    ):
        for child in (first, second):
            started = begin(child, options)
            found["new"].append(round(started["seconds"] * 1e3 + started["first_token"], 3))
            if child is first:
                time.sleep(options.wait)
                found["held"] = child.ask("release")["held"]
                time.sleep(options.wait)
                found["asleep_MiB"].append(used_mib())
        awake, asleep = second, first
        for number in range(2 + SWITCHES[name]):
            time.sleep(options.wait)
            total, generation, lost = switch(name, awake, asleep)
            if lost:
                failures.append(f"{name}, switch {number}: {lost}")
                found["lost"].append(number)
            counts = "" if number >= 2 else ", not counted"
            say(f"{name}: switch {number}: {total:.0f} ms, woken in {generation:.0f} ms{counts}")
            if not counts:
                found["switch"].append(total)
            awake, asleep = asleep, awake
        if place == "peer":
            found["neighbour_MiB"].append(used_mib(1))
        # Both engines have generated several times by now; each has half of the memory that stays
        # in use after the release.
        awake.ask("release")
        time.sleep(options.wait)
        found["asleep_MiB"].append(used_mib() / 2)
    return found


def switch(name: str, awake: Child, asleep: Child) -> tuple[float, float, str]:
    """Put one engine to sleep and generate with the other.

    Returns three values: the milliseconds to the first token for both steps together, the same for
    the second step alone, and a description of the difference between the output and the engine's
    first output. The description is "" if the outputs are equal.
    """
    begin = time.perf_counter()
    awake.ask("release")
    released = (time.perf_counter() - begin) * 1e3
    reply = asleep.ask("generate_first", resume=name != OURS)
    generation = reply["first_token"]
    return round(released + generation, 3), generation, reply["lost"]


def row(ours: Found, peer: str, theirs: Found, values: str) -> dict[str, Any]:
    """Return the row that compares memsaver's switches with `theirs[values]`."""
    made = results.measurement(METRIC, ours["switch"], peer, theirs[values], bench=BENCH)
    made["detail"]["memsaver_asleep_MiB"] = ours["asleep_MiB"]
    made["detail"]["memsaver_held"] = ours["held"]
    if theirs is not ours:
        made["detail"]["peer_asleep_MiB"] = theirs["asleep_MiB"]
        made["detail"]["peer_changed_outputs"] = theirs["lost"]  # numbers of switches
    return made


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for METRIC and RESIDENT."""
    if options.touch_gib:
        say(host_memory.touch_elsewhere(int(2 * options.touch_gib * host_memory.GIB)))
    ours = measure_one(OURS, options, failures)
    if not ours["switch"] or ours["lost"]:
        return
    yield row(ours, NEW, ours, "new")
    if not options.peer:
        return
    theirs = measure_one(DEFAULT, options, failures)
    if theirs["switch"]:
        yield row(ours, PEERS[DEFAULT], theirs, "switch")
    if theirs["asleep_MiB"]:
        yield results.measurement(
            RESIDENT, ours["asleep_MiB"], PEERS[DEFAULT], theirs["asleep_MiB"], bench=BENCH
        )


def weights_mib(options: argparse.Namespace) -> float:
    """Return the size of an engine's weights in MiB."""
    tensors = checkpoint(SMALL if options.small else BIG)
    return sum(2 * math.prod(shape) for _, shape in tensors) / (1 << 20)  # bfloat16


def measure_neighbour(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the row for NEIGHBOUR; yield none on a machine with fewer than two GPUs."""
    if options.device != "cpu" and count_gpus() < 2:
        say(f"{NEIGHBOUR} needs two GPUs")
        return
    host = measure_one(OURS, options, failures)
    before = used_mib(1)
    neighbour = measure_one(OURS, options, failures, "peer")
    if not host["switch"] or not neighbour["switch"] or host["lost"] or neighbour["lost"]:
        return
    grown, backups = neighbour["neighbour_MiB"][0] - before, 2 * weights_mib(options)
    if grown < backups:
        failures.append(
            f"{NEIGHBOUR}: the memory in use on the other GPU grew by {grown:.0f} MiB, less than "
            f"the backups of {backups:.0f} MiB: some of them are in host memory"
        )
        return
    row = results.measurement(NEIGHBOUR, neighbour["switch"], HOST, host["switch"], bench=BENCH)
    row["detail"]["memsaver_asleep_MiB"] = neighbour["asleep_MiB"]
    row["detail"]["memsaver_neighbour_MiB"] = neighbour["neighbour_MiB"]
    yield row
