"""Compare a backed-up tag that has 16 GB on each of two GPUs with a tag of 16 GB on one GPU.

All cycles after the first are measured. All contents are changed between cycles. Each tag is
measured in its own process, and the processes run one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import results
import workloads
from children import Child, attempt
from libraries import OURS, open_library
from saved import PlainCopy, Saved
from serve import Worker

ONE = "memsaver, one GPU"


class Spread(Worker):
    """A worker with one copy of the decoder on each GPU, all in one tag."""

    def __init__(self, name: str, gpus: int) -> None:
        self._gpus = range(gpus)
        workloads.start_cuda(self._gpus)
        self._library = open_library(name)

    def setup(self) -> dict[str, Any]:
        """Create the tensors, and pause them once."""

        def tensors() -> list[Any]:
            return [tensor for gpu in self._gpus for tensor in workloads.decoder(gpu)]

        self._saved = Saved(self._library, "weights", "host", tensors, self._gpus)
        self._saved.pause()
        self._saved.resume()
        return {"bytes": self._saved.bytes}

    def cycle(self) -> dict[str, Any]:
        """Change all contents, pause and resume."""
        self._saved.change()
        return {"pause": self._saved.pause(), "resume": self._saved.resume()}

    def plain(self) -> dict[str, Any]:
        """Run plain copies of the same number of bytes on all GPUs at the same time."""
        share = self._saved.bytes // len(self._gpus)
        copies = [PlainCopy(share, gpu) for gpu in self._gpus]

        def timed(name: str) -> float:
            return workloads.timed_ms(
                lambda: [getattr(copy, name)() for copy in copies], list(self._gpus)
            )

        timed("queue_out")
        return {"pause": timed("queue_out"), "resume": timed("queue_in")}


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for two_gpu_*."""
    found: dict[int, dict[str, list[float]]] = {}
    with attempt(failures), contextlib.ExitStack() as stack:
        children = {
            gpus: stack.enter_context(Child("parts.two_gpu:Spread", OURS, gpus=gpus))
            for gpus in (1, 2)
        }
        for child in children.values():
            child.ready()
        for gpus, child in children.items():
            with child:
                child.ask("setup")
                times: dict[str, list[float]] = {"pause": [], "resume": []}
                for _ in range(options.backed_cycles):
                    reply = child.ask("cycle")
                    for key, values in times.items():
                        values.append(reply[key])
                found[gpus] = times
                if gpus == 2:
                    plain = [child.ask("plain") for _ in range(options.backed_cycles)]
        for what in ("pause", "resume"):
            metric = f"two_gpu_backed_{what}_ms"
            limit = [reply[what] for reply in plain]
            yield results.measurement(metric, found[2][what], ONE, found[1][what], limit)
