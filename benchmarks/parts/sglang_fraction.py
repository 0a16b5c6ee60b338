"""Find the largest mem_fraction_static with which an engine can wake up next to a trainer.

The trainer allocates memory while the engine sleeps, and keeps a copy of the weights until the
engine has received them. If the engine wakes all at once, it resumes all memory while the trainer
still has its copy. If the engine wakes in stages, the weights are resumed and updated, the trainer
drops its copy, and the KV cache is resumed. For each fraction, one engine tries both kinds of
wake-up, first all at once. An engine that has run out of memory must keep running, wake up after
the trainer has released its memory, and continue.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import comparison
import results
from children import Failed, attempt
from engine_process import say
from libraries import OURS
from sglang_engine import BENCH, GRAPH, KV_CACHE, TAGS, WEIGHTS, EngineWorker, running

METRIC = "sglang_max_mem_fraction"
STAGED, AT_ONCE = "staged", "at_once"
PEER = "memsaver, waking all at once"

Outcomes = dict[float, str]  # by fraction: "" if the wake-up completed, otherwise the problem


class Waking(EngineWorker):
    """A worker that puts the engine to sleep and wakes it up next to a trainer."""

    def at_once(self) -> dict[str, Any]:
        """Resume all memory at once, while the trainer still has its copy."""
        self._sleep(seed=1)
        refused = self._wake(TAGS)
        if not refused:
            self.update()
        self._drop()
        if refused:
            self._recover()
        self._use()
        return {"refused": refused}

    def staged(self) -> dict[str, Any]:
        """Resume and update the weights, drop the trainer's copy, and resume the KV cache."""
        self._sleep(seed=2)
        refused = self._wake((GRAPH, WEIGHTS))
        if not refused:
            self.update()
        self._drop()
        refused = refused or self._wake((KV_CACHE,))
        if refused:
            self._recover()
        self._use()
        return {"refused": refused}

    def _sleep(self, seed: int) -> None:
        self.rest()
        for tag in TAGS:
            self.release_ms(tag)
        self.trainer.take(seed)

    def _wake(self, tags: Sequence[str]) -> str:
        """Resume tags; return the reason if the tags remain released, otherwise ""."""
        import memsaver

        try:
            self.engine.resume_memory_occupation(tags=list(tags))
        except memsaver.OutOfDeviceMemoryError as error:
            return str(error)
        return ""

    def _recover(self) -> None:
        refused = self._wake(TAGS)  # mapped tags stay mapped
        if refused:
            raise RuntimeError(f"the engine does not wake up on an otherwise idle GPU: {refused}")

    def _drop(self) -> None:
        self.trainer.drop()
        self.rest()

    def _use(self) -> None:
        if self.generate([[5, 6, 7, 8]], 16) != 16:
            raise RuntimeError("the engine does not generate after its wake-up")


def try_one(
    fraction: float,
    options: argparse.Namespace,
    failures: list[str],
    found: Mapping[str, Outcomes],
) -> None:
    """Try both wake-ups with one fraction; start a second engine if the first one terminates."""
    ways = [AT_ONCE, STAGED]
    while ways:
        with running(
            f"{__name__}:Waking",
            OURS,
            options,
            fraction=fraction,
            backup=False,
            trainer_bytes=int(options.trainer_gb * 1e9),
        ) as (child, _):
            alive = True
            while ways and alive:
                way = ways.pop(0)
                try:
                    outcome = child.ask(way)["refused"]
                except Failed as error:  # a failure other than a lack of memory
                    outcome, alive = str(error), False
                    failures.append(f"mem_fraction_static {fraction}, {way}: {error}")
                found[way][fraction] = outcome
                say(f"mem_fraction_static {fraction}, {way}: {outcome or 'completed'}")


def rows(found: Mapping[str, Outcomes], failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the row for the largest fractions; record a failure if a kind never completed."""
    largest = {
        way: max((at for at, wrong in outcomes.items() if not wrong), default=None)
        for way, outcomes in found.items()
    }
    ours, theirs = largest[STAGED], largest[AT_ONCE]
    if ours is None or theirs is None:
        if any(found.values()):
            comparison.show(METRIC, [value for value in (ours, theirs) if value is not None])
        never = " and ".join(way for way, value in largest.items() if value is None)
        failures.append(f"{METRIC}: {never} never completed; try smaller --fractions")
        return
    row = results.measurement(METRIC, [ours], PEER, [theirs], bench=BENCH, higher_is_better=True)
    row["detail"] = {
        who: {str(at): wrong or "completed" for at, wrong in found[way].items()}
        for who, way in (("memsaver", STAGED), ("peer", AT_ONCE))
    }
    yield row


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the row for sglang_max_mem_fraction."""
    found: dict[str, Outcomes] = {STAGED: {}, AT_ONCE: {}}
    for fraction in options.fractions:
        with attempt(failures):
            try_one(fraction, options, failures, found)
    yield from rows(found, failures)
