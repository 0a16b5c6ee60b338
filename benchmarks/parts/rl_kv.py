"""Find an engine's largest KV cache, alone on the GPU and next to a trainer.

Next to a trainer, the engine runs a complete step (see rl_engine.py). In this step, the trainer
keeps a copy of the weights until the engine has received them. If the engine wakes in stages, the
KV cache is resumed after this copy is released; if the engine wakes all at once, the cache is
resumed before the copy is released. A KV cache fits if the engine starts, the step completes and
the engine generates. The number of tokens is the capacity that the engine reports.

The first engine has a small KV cache and is measured in three configurations: alone, next to a
trainer with a wake-up in stages, and next to a trainer with a wake-up all at once. The remaining
free memory determines the next size to try for each configuration (kv_search.py), with one engine
per trial. The peer, which wakes in stages, is first tried with the largest number of tokens that
has fit so far with memsaver's staged wake-up; trials after a failure use fewer tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import results
from children import Child, Ended, Failed, attempt
from engine_model import BIG, SMALL, kv_bytes
from engine_process import say, wait_until_free
from host_memory import MIB
from kv_search import Search, Trial
from libraries import DEFAULT, OURS, PEERS
from sglang_engine import running

BENCH = "rl_cycle"
WORKER = "rl_engine:Loop"
METRIC, AT_ONCE_METRIC = "rl_kv_tokens_fraction", "rl_kv_tokens_fraction_at_once"
ALONE_PEER = "memsaver, the engine alone on the GPU"

ALONE, STAGED, AT_ONCE, PEER_STAGED = "alone", "staged", "at once", "peer, staged"

PROBE = 0.75  # mem_fraction_static of the first engine, which fits in all configurations
FULL = 0.995  # mem_fraction_static of the others, so that the requested tokens are the limit
PEER_TRIES = 3  # the maximum number of the peer's engines, which may never complete a step
STATES = 1  # optimizer states, which are paused when memory is scarce
STEP_SECONDS = 150  # the limit for a step; the peer's takes a minute


@dataclass
class Way:
    """A configuration of the engine and the trainer, with its trials.

    Attributes:
        name: the configuration's name.
        saver: the engines' memory saver.
        search: the trials.
        given_up: the reason why no more trials follow, or "".
    """

    name: str
    saver: str
    search: Search
    given_up: str = ""

    @property
    def tokens(self) -> int:
        """Return the largest number of tokens that fit; 0 if no trial fit."""
        return self.search.best.tokens if self.search.best else 0


def probe(ways: Sequence[Way], options: argparse.Namespace) -> None:
    """Try memsaver's configurations with one engine, first alone, before the trainer exists."""
    own = [way for way in ways if way.saver == OURS]
    with engine(OURS, options, PROBE, 0) as (child, started):
        for way in sorted(own, key=lambda way: way.name != ALONE):
            reply = ask(child, way)
            note(way, reply, started["tokens"])
            if reply["refused"]:
                break  # the engine cannot continue


def try_one(way: Way, tokens: int, options: argparse.Namespace) -> None:
    """Try an engine with room for `tokens` tokens; a failed start counts as not fitting.

    Raises Failed for failures other than a lack of memory.
    """
    say(f"{way.name}: trying {tokens:,} tokens")
    wait_until_free(options.idle_mib)
    started: dict[str, Any] = {}
    try:
        with engine(way.saver, options, FULL, tokens) as (child, started):
            reply = ask(child, way)
    except Failed as error:
        if started:
            raise
        reply = {"refused": str(error)}
    note(way, reply, int(started.get("tokens", tokens)))


def engine(
    library: str, options: argparse.Namespace, fraction: float, tokens: int
) -> contextlib.AbstractContextManager[tuple[Child, dict[str, Any]]]:
    """Return a running engine; its weights need no backup, because an update replaces them."""
    return running(
        WORKER,
        library,
        options,
        fraction=fraction,
        tokens=tokens,
        backup=False,
        states=STATES,
        bucket_bytes=options.bucket_mib << 20,
    )


def ask(child: Child, way: Way) -> dict[str, Any]:
    """Return an engine's result for one configuration. Raises Failed if contents were lost."""
    try:
        if way.name == ALONE:
            return child.ask("alone", within=STEP_SECONDS)
        reply = child.ask("fit", within=STEP_SECONDS, at_once=way.name == AT_ONCE)
    except Ended as error:
        return {"refused": str(error)}
    if reply.get("lost"):
        raise Failed(f"{way.name}: lost {reply['lost']}")
    return reply


def note(way: Way, reply: Mapping[str, Any], tokens: int) -> None:
    """Record and print a result."""
    if reply["refused"]:
        trial = Trial(tokens, why=reply["refused"])
    else:
        trial = Trial(tokens, spare=int(reply["spare"]))
    way.search.trials.append(trial)
    outcome = trial.why or f"fits, {int(reply['spare']) / MIB:,.0f} MiB left"
    say(f"{way.name}: {tokens:,} tokens: {outcome}")


def proposal(way: Way, ways: Sequence[Way]) -> int | None:
    """Return the number of tokens to try next; None if there is no further trial."""
    if way.given_up or (way.saver != OURS and len(way.search.trials) >= PEER_TRIES):
        return None
    if way.search.trials:
        return way.search.proposal()
    return next((other.tokens for other in ways if other.name == STAGED), 0) or None


def look(ways: Sequence[Way], options: argparse.Namespace, failures: list[str]) -> None:
    """Run trials of all configurations in turn, until all are settled or the time has expired."""
    end = time.monotonic() + options.kv_seconds
    with attempt(failures):
        probe(ways, options)
    while any([one_more(way, ways, options, failures, end) for way in ways]):
        pass
    for way in ways:
        if (tokens := proposal(way, ways)) is not None:
            say(f"{way.name}: no time to try {tokens:,} tokens")


def one_more(
    way: Way,
    ways: Sequence[Way],
    options: argparse.Namespace,
    failures: list[str],
    end: float,
) -> bool:
    """Run a further trial of `way` if it is useful and time remains; return whether it ran."""
    tokens = proposal(way, ways)
    if tokens is None or time.monotonic() > end:
        return False
    try:
        try_one(way, tokens, options)
    except Failed as error:
        way.given_up = str(error)
        failures.append(f"{way.name}: {error}")
    return True


def rows(found: Mapping[str, Way], failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield rows with KV cache sizes, as fractions of the size for an engine alone on the GPU."""
    alone = found[ALONE]
    if not alone.search.is_settled:
        failures.append(f"{METRIC}: the engine alone was not settled; increase --kv-seconds")
        return
    fractions = {name: way.tokens / alone.tokens for name, way in found.items()}
    trials = {"trials": {name: trials_of(way) for name, way in found.items()}}

    def is_known(name: str, metric: str) -> bool:
        if found[name].search.is_settled:
            return True
        failures.append(f"{metric}: {name} was not settled; increase --kv-seconds")
        return False

    def with_trials(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"detail": row["detail"] | trials}

    if is_known(STAGED, METRIC):
        yield with_trials(measured(METRIC, fractions[STAGED], ALONE_PEER, 1.0))
        if PEER_STAGED in found:
            yield from map(with_trials, peer_row(found[PEER_STAGED], fractions, failures))
    if is_known(AT_ONCE, AT_ONCE_METRIC):
        yield with_trials(measured(AT_ONCE_METRIC, fractions[AT_ONCE], ALONE_PEER, 1.0))


def peer_row(
    peer: Way, fractions: Mapping[str, float], failures: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the peer's row for waking in stages: its largest KV cache or a failure's reason."""
    ended = next((one.why for one in peer.search.trials if one.why), "") or peer.given_up
    is_over = peer.given_up or len(peer.search.trials) >= PEER_TRIES
    if peer.tokens:
        yield measured(METRIC, fractions[STAGED], PEERS[DEFAULT], fractions[PEER_STAGED])
    elif ended and is_over:
        ours = [round(fractions[STAGED], 4)]
        yield results.unanswered(METRIC, ours, PEERS[DEFAULT], ended, bench=BENCH)
    else:
        failures.append(
            f"{METRIC}: no time to try the peer with less; increase --kv-seconds: {ended}"
            if ended
            else f"{METRIC}: no time to try the peer; increase --kv-seconds"
        )


def measured(metric: str, ours: float, peer: str, theirs: float) -> dict[str, Any]:
    """Return a row that compares two fractions."""
    values = [round(ours, 4)], peer, [round(theirs, 4)]
    return results.measurement(metric, *values, bench=BENCH, higher_is_better=True)


def trials_of(way: Way) -> list[dict[str, Any]]:
    """Return a configuration's trials in order, for the row's detail."""
    return [
        {"tokens": one.tokens}
        | ({"refused": one.why} if one.why else {"spare_MiB": (one.spare or 0) // MIB})
        for one in way.search.trials
    ]


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for rl_kv_tokens_*."""
    cell = kv_bytes(SMALL if options.small else BIG)
    names = [(STAGED, OURS), (ALONE, OURS), (AT_ONCE, OURS)]
    names += [(PEER_STAGED, DEFAULT)] if options.peer else []
    found = {name: Way(name, library, Search(cell)) for name, library in names}
    look(list(found.values()), options, failures)
    yield from rows(found, failures)
