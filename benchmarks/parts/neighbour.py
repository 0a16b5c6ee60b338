"""Compare pauses and resumes of 16 GB with backups on another GPU and on the host.

All cycles after the first are measured. All contents are changed between cycles. Each kind of
backup is measured in its own process, and the processes run one after the other. The limit is a
plain copy of the same number of bytes between the two GPUs, which is measured before each pause and
each resume.
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
from libraries import OURS, open_library
from saved import Saved
from serve import Worker
from workloads import GIB

HOST = "memsaver, host backup"
GPUS = (0, 1)


class Neighbour(Worker):
    """A worker that pauses and resumes the decoder on GPU 0, and copies between the GPUs."""

    def __init__(self, name: str, backup: str) -> None:
        import torch

        self._torch = torch
        workloads.start_cuda(GPUS)
        self._library = open_library(name)
        self._backup = backup

    def setup(self) -> dict[str, Any]:
        """Create the tensors and the copies' buffers; return the durations of the first cycle."""
        self._saved = Saved(self._library, "weights", self._backup, workloads.decoder)
        self._buffers = [
            self._torch.empty(GIB, dtype=self._torch.uint8, device=f"cuda:{gpu}") for gpu in GPUS
        ]
        self._copy_ms(0, 1)
        return {"pause": self._saved.pause(), "resume": self._saved.resume()}

    def cycle(self) -> dict[str, Any]:
        """Change all contents, then pause and resume, each after a plain copy."""
        self._saved.change()
        return {
            "plain_pause": self._copy_ms(0, 1),
            "pause": self._saved.pause(),
            "plain_resume": self._copy_ms(1, 0),
            "resume": self._saved.resume(),
        }

    def unchanged(self) -> dict[str, Any]:
        """Pause and resume with unchanged contents."""
        return {"unchanged_pause": self._saved.pause(), "unchanged_resume": self._saved.resume()}

    def _copy_ms(self, source: int, target: int) -> float:
        total = self._saved.bytes
        sizes = [min(GIB, total - at) for at in range(0, total, GIB)]

        def copies() -> None:
            for size in sizes:
                self._buffers[target][:size].copy_(self._buffers[source][:size])

        return workloads.timed_ms(copies, GPUS)


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for peer_*."""
    found: dict[str, dict[str, list[float]]] = {}
    with attempt(failures), contextlib.ExitStack() as stack:
        children = {
            backup: stack.enter_context(Child("parts.neighbour:Neighbour", OURS, backup=backup))
            for backup in ("peer", "host")
        }
        for child in children.values():
            child.ready()
        for backup, child in children.items():
            with child:
                first = child.ask("setup")
                times: dict[str, list[float]] = {f"first_{key}": [first[key]] for key in first}
                for _ in range(options.backed_cycles):
                    for key, value in child.ask("cycle").items():
                        times.setdefault(key, []).append(value)
                for _ in range(options.backed_cycles):
                    for key, value in child.ask("unchanged").items():
                        times.setdefault(key, []).append(value)
                found[backup] = times
                for key, values in times.items():
                    comparison.show(f"{backup}_{key}_16GB_ms", values)
        for what in ("pause", "resume"):
            ours, theirs = found["peer"][what], found["host"][what]
            limit = found["peer"][f"plain_{what}"]
            yield results.measurement(f"peer_{what}_16GB_ms", ours, HOST, theirs, limit)
