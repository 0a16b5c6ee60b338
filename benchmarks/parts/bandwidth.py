"""Compare the bandwidth of a kernel on a region's memory with that on plain memory."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import results
import workloads
from children import Child, attempt
from libraries import OURS
from serve import Worker
from workloads import GIB

TURNS = 40
WARM_UP = 5  # turns in which the clocks rise


class Bandwidth(Worker):
    """A worker that runs the kernel."""

    def __init__(self, name: str) -> None:
        import torch

        if name != OURS:
            raise ValueError(f"{name} is not measured here")
        workloads.start_cuda()
        self._torch = torch

    def bandwidth(self) -> dict[str, Any]:
        """Return, by memory kind, the GB/s of a kernel that reads one tensor and writes another."""
        import memsaver

        with memsaver.region("bandwidth"):
            ours = self._pair()
        plain = self._pair()
        fresh = self._turn_about(ours, plain)
        memsaver.pause("bandwidth")
        memsaver.resume("bandwidth")
        ours[0].fill_(1)
        return {"fresh": fresh, "resumed": self._turn_about(ours, plain)}

    def _pair(self) -> tuple[Any, Any]:
        source = self._torch.empty(GIB, dtype=self._torch.float32, device="cuda").fill_(1)
        return source, self._torch.empty_like(source)

    def _speed(self, source: Any, target: Any) -> float:
        begin = self._torch.cuda.Event(enable_timing=True)
        end = self._torch.cuda.Event(enable_timing=True)
        begin.record()
        self._torch.add(source, 1, out=target)
        end.record()
        end.synchronize()
        return float(2 * source.nbytes / 1e6 / begin.elapsed_time(end))

    def _turn_about(self, ours: tuple[Any, Any], plain: tuple[Any, Any]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {"region": [], "plain": []}
        for turn in range(TURNS + WARM_UP):
            order = [("region", ours), ("plain", plain)]
            for name, tensors in order[:: 1 if turn % 2 else -1]:
                value = self._speed(*tensors)
                if turn >= WARM_UP:
                    found[name].append(round(value, 1))
        return found


def rows(found: dict[str, dict[str, list[float]]]) -> Iterator[dict[str, Any]]:
    """Yield a region's bandwidth as a percentage of plain memory's; the detail contains GB/s."""
    for when, speeds in found.items():
        plain = statistics.median(speeds["plain"])
        percent = round(100 * statistics.median(speeds["region"]) / plain, 2)
        yield {
            "bench": "pause_resume",
            "metric": "region_bandwidth" + ("" if when == "fresh" else f"_{when}"),
            "memsaver": percent,
            "peer": "plain memory",
            "peer_value": 100.0,
            "ratio": results.ratio(percent, 100.0, higher_is_better=True),
            "limit": None,
            "detail": {"memsaver_GBps": speeds["region"], "peer_GBps": speeds["plain"]},
        }


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for the bandwidth of new memory and of resumed memory."""
    with attempt(failures), Child("parts.bandwidth:Bandwidth", OURS) as child:
        yield from rows(child.ask("bandwidth"))
