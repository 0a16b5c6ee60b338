"""Measure pauses and resumes of 16 GB with a host backup (first, changed, unchanged, lora).

Each process exits before the next process starts, so at most one process has a backup at a time.
First pauses are measured in separate processes. Each library's last process also runs the later
cycles. In memsaver's process, a plain copy to or from pinned memory precedes each pause and each
resume of changed contents. Each copy has the same size as the contents.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import comparison
import results
import workloads
from children import Child, attempt
from libraries import DEFAULT, OURS, PEERS, RETAINED, open_library
from saved import PlainCopy, Saved
from serve import Worker

# A pause of torch_memory_saver's default setting takes 5 seconds.
SLOW_CHANGED, SLOW_UNCHANGED = 3, 2

CHANGES = {
    "changed": slice(None),
    "unchanged": slice(0),
    "lora": slice(1, None, 97),  # 2 tensors of 195, 84 MB
}

PLAIN = "plain pinned copy"

Values = dict[str, list[float]]  # by operation


class Backed(Worker):
    """A worker that pauses and resumes the decoder with a backup, and runs plain copies."""

    def __init__(self, name: str) -> None:
        workloads.start_cuda()
        self._library = open_library(name)

    def first(self) -> dict[str, Any]:
        """Run this process's first pause and first resume."""
        self._saved = Saved(self._library, "weights", "host", workloads.decoder)
        return {"pause": self._saved.pause(), "resume": self._saved.resume()}

    def prepare_plain(self) -> dict[str, Any]:
        """Create the plain copy's buffers."""
        self._plain = PlainCopy(self._saved.bytes)
        return {}

    def cycle(self, kind: str, plain: bool) -> dict[str, Any]:
        """Change the tensors that `kind` selects, then pause and resume."""
        found: dict[str, Any] = {}
        self._saved.change(CHANGES[kind])
        if plain:
            found["plain_out"] = self._plain.out_ms()
        found["pause"] = self._saved.pause()
        if plain:
            found["plain_in"] = self._plain.in_ms()
        found["resume"] = self._saved.resume()
        return found


def later_cycles(child: Child, cycles: int) -> Values:
    """Return the durations of the cycles after a child's first pause, by kind and call."""
    slow = child.name == DEFAULT
    planned = {
        "changed": min(cycles, SLOW_CHANGED) if slow else cycles,
        "unchanged": min(cycles, SLOW_UNCHANGED) if slow else cycles,
        "lora": 0 if slow else cycles,
    }
    found: Values = {}
    if child.name == OURS:
        child.ask("prepare_plain")
    for kind, count in planned.items():
        for _ in range(count):
            plain = child.name == OURS and kind == "changed"
            for key, value in child.ask("cycle", kind=kind, plain=plain).items():
                found.setdefault(f"{kind}_{key}", []).append(value)
    return found


def rows(first: Values, later: dict[str, Values]) -> Iterator[dict[str, Any]]:
    """Yield all rows, computed from each library's first pauses and later cycles."""

    def of(key: str) -> Values:
        return {name: found[key] for name, found in later.items() if key in found}

    yield from comparison.compared("backed_first_pause_ms", first)
    for what, direction in (("pause", "out"), ("resume", "in")):
        plain = of(f"changed_plain_{direction}").get(OURS)
        values = of(f"changed_{what}")
        yield from comparison.compared(f"backed_changed_{what}_ms", values, plain)
        if plain and OURS in values:
            metric = f"backed_changed_{what}_rate"
            yield results.percentage(metric, values[OURS], PLAIN, plain)
    for what in ("pause", "resume"):
        yield from comparison.compared(f"backed_unchanged_{what}_ms", of(f"unchanged_{what}"))
    yield from comparison.compared("lora_pause_ms", of("lora_pause"))


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for backed_* and lora_*."""
    names = [OURS, *([DEFAULT] if options.peer else ())] * options.processes
    names += [RETAINED] if options.peer else []
    last = {name: at for at, name in enumerate(names)}
    first: Values = {}
    later: dict[str, Values] = {}
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child("parts.backed:Backed", name)) for name in names]
        for child in children:
            with attempt(failures):
                child.ready()
        for at, child in enumerate(children):
            with child, attempt(failures):
                first.setdefault(child.name, []).append(child.ask("first")["pause"])
                if at == last[child.name]:
                    later[child.name] = later_cycles(child, options.backed_cycles)
    if not set(PEERS) & set(later) and OURS in later:
        comparison.show("backed_first_pause_ms", first[OURS])
        for key, values in later[OURS].items():
            comparison.show(f"backed_{key}_ms", values)
    yield from rows(first, later)
