"""Tests memsaver end to end: decoders with static KV caches and captured decode steps share a GPU
with a trainer.

    python decoder_scenario.py [--devices 0,1] [--threads 3] [--kv-backup none] [--whole-process]

test_acceptance.py runs it in a separate process. The program prints a JSON line, or fails with an
assertion. Nothing in this program accesses paused memory, because such an access would destroy the
process's CUDA context.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from typing import Any

import torch
from decoder_memory import (
    HEADROOM,
    MIB,
    TAGS,
    bits,
    filled,
    free,
    lies_in,
    nbytes,
    resident,
    same,
    tidy,
    use_of,
)
from decoder_model import FULL, SMALL, Decoder, build_all

import memsaver

FREED = 0.98  # the fraction of the bytes that a pause must release
NOISE = 4 * MIB  # the driver's own allocations between two readings


class Phases:
    """The durations of the scenario's phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def done(self, name: str) -> None:
        """Add the time since the end of the previous phase to this phase."""
        now = time.perf_counter()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self._last, 3)
        self._last = now


def pause_tags(cycle: int) -> int:
    """Pause all tags, with different calls in each cycle; return the number of bytes in the
    reports.
    """
    if cycle % 3 == 0:
        return memsaver.pause(*TAGS).bytes
    if cycle % 3 == 1:
        return memsaver.pause().bytes
    return sum(memsaver.pause(tag).bytes for tag in reversed(TAGS))


def resume_rest(cycle: int) -> None:
    """Resume the tags that are still paused, with different calls in each cycle."""
    if cycle % 3 == 0:
        memsaver.resume("kv_cache", "cuda_graph")
    elif cycle % 3 == 1:
        report = memsaver.resume()
        assert set(report.changed) == {"kv_cache", "cuda_graph"}, report.changed
    else:
        memsaver.resume("kv_cache")
        memsaver.resume("cuda_graph")


def run(options: argparse.Namespace, decoders: list[Decoder]) -> dict[str, Any]:
    """Run the scenario with regions and return its results."""
    devices: list[int] = options.devices
    phases = Phases()
    for device in devices:  # cuBLAS allocates its workspace here, before any region is open
        with torch.cuda.device(device):
            use_of(device, 256 * MIB)
    tidy(devices)
    phases.done("start")

    build_all(decoders, in_threads=len(decoders) > len(devices))
    weights = [tensor for decoder in decoders for tensor in decoder.weights()]
    kv = [tensor for decoder in decoders for tensor in decoder.kv()]
    parameters = max(sum(p.numel() for p in each.model.parameters()) for each in decoders)
    phases.done("build")

    with torch.no_grad():
        reference = [decoder.decode() for decoder in decoders]
        again = [decoder.decode() for decoder in decoders]
    for logits, other in zip(reference, again, strict=True):
        assert torch.isfinite(logits).all()
        assert logits.float().std() > 0
        assert same(logits, other), "replays differ before any pause"
    del again
    saved_weights = [tensor.clone() for tensor in weights]
    saved_kv = [tensor.clone() for tensor in kv] if options.kv_backup == "none" else []
    assert bits(kv[0]).any()  # loads its kernel, which needs memory too
    addresses = [tensor.data_ptr() for tensor in weights + kv]
    ranges = {tag: memsaver.ranges(tag) for tag in TAGS}
    for tag, tensors in (("weights", weights), ("kv_cache", kv)):
        for tensor in tensors:
            assert lies_in(tensor, ranges[tag]), f"a tensor of {tag} lies outside of it"
    for decoder in decoders:
        assert lies_in(decoder.logits, ranges["cuda_graph"]), (
            "the logits lie outside the graph's tag"
        )
    phases.done("reference")

    first_used: dict[int, int] = {}
    figures: dict[str, Any] = {"freed_ratio": [], "pause_s": [], "resume_s": []}
    with filled(devices), torch.no_grad():
        for cycle in range(options.cycles):
            tidy(devices)
            before = {device: free(device) for device in devices}
            held = {device: resident(device) for device in devices}
            start = time.perf_counter()
            reported = pause_tags(cycle)
            figures["pause_s"].append(round(time.perf_counter() - start, 4))
            assert all(memsaver.state(tag) == "paused" for tag in TAGS)
            assert reported == sum(held.values()), (reported, held)
            paused = {device: free(device) for device in devices}
            for device in devices:
                grown = paused[device] - before[device]
                tensors = [t for t in weights + kv if t.device.index == device]
                graph = sum(
                    row.allocated_bytes
                    for row in memsaver.stats()["cuda_graph"]
                    if row.device == device
                )
                assert graph > 0
                wanted = nbytes(tensors) + graph
                assert grown >= FREED * wanted, f"freed {grown} of {wanted} bytes on {device}"
                assert grown >= FREED * held[device], f"freed {grown} of {held[device]} bytes"
                if cycle > 0:  # the first pause pins host memory, which uses device memory too
                    assert abs(grown - held[device]) <= NOISE, (grown, held[device])
                assert resident(device) == 0
                figures["freed_ratio"].append(round(grown / wanted, 4))
            phases.done("pause")

            for device in devices:
                used = use_of(device, paused[device] - HEADROOM // 2)
                assert used > before[device], "the trainer could have had this without a pause"
            tidy(devices)
            phases.done("trainer")

            start = time.perf_counter()
            memsaver.resume("weights")
            figures["resume_s"].append(round(time.perf_counter() - start, 4))
            for tensor, saved in zip(weights, saved_weights, strict=True):
                assert same(tensor, saved), "the weights came back changed"
            tidy(devices)
            for device in devices:
                taken = paused[device] - free(device)
                back = resident(device, ("weights",))
                assert back >= nbytes([t for t in weights if t.device.index == device])
                assert abs(taken - back) <= NOISE, f"{taken} bytes taken for {back} of weights"
                assert resident(device, TAGS[1:]) == 0
            assert memsaver.state("weights") == "mapped"
            assert memsaver.state("kv_cache") == "paused"
            assert memsaver.state("cuda_graph") == "paused"
            phases.done("weights")

            resume_rest(cycle)
            assert all(memsaver.state(tag) == "mapped" for tag in TAGS)
            assert [tensor.data_ptr() for tensor in weights + kv] == addresses
            assert {tag: memsaver.ranges(tag) for tag in TAGS} == ranges
            if saved_kv:
                for tensor in kv:
                    assert not bits(tensor).any(), "memory without a backup does not read as zero"
                for tensor, saved in zip(kv, saved_kv, strict=True):
                    tensor.copy_(saved)
            for decoder, logits in zip(decoders, reference, strict=True):
                assert same(decoder.decode(), logits), f"cycle {cycle}: the logits differ"
            tidy(devices)
            for device in devices:
                now = free(device)
                assert now >= before[device] - (64 * MIB if cycle == 0 else NOISE), (
                    f"cycle {cycle} on {device}: {before[device]} bytes free before, {now} after"
                )
                first = first_used.setdefault(device, now)
                assert abs(now - first) <= NOISE, f"{first} bytes free after cycle 0, {now} now"
            phases.done("rest")
    return {
        "parameters": parameters,
        "bytes": {"weights": nbytes(weights), "kv_cache": nbytes(kv)},
        "resident": {tag: sum(r.resident_bytes for r in memsaver.stats()[tag]) for tag in TAGS},
        **figures,
        "seconds": phases.seconds,
    }


def run_whole_process(options: argparse.Namespace, decoder: Decoder) -> dict[str, Any]:
    """Run the scenario without regions; the environment puts all of the process's memory in one
    tag.
    """
    tag = "everything"
    (device,) = options.devices
    phases = Phases()
    with torch.no_grad():
        decoder.build(lambda tag, backup: contextlib.nullcontext())
        decoder.prefill()
        decoder.capture(torch.cuda.graph)
        reference = decoder.decode().cpu()
        assert lies_in(decoder.model.lm_head.weight, memsaver.ranges(tag))
        assert lies_in(decoder.logits, memsaver.ranges(tag))
        phases.done("build")
        first = None
        for cycle in range(options.cycles):
            tidy([device])
            before, held = free(device), resident(device, (tag,))
            assert held > nbytes(decoder.weights() + decoder.kv())
            memsaver.pause()
            grown = free(device) - before
            assert grown >= FREED * held, f"freed {grown} of {held} bytes"
            phases.done("pause")
            # No matrix products here: cuBLAS's workspace is in the tag too, so it is paused.
            with memsaver.disabled():
                trainer = torch.full((held // 2,), 3, dtype=torch.uint8, device="cuda")
                assert trainer.max().item() == 3
                del trainer
            tidy([device])
            phases.done("trainer")
            memsaver.resume()
            assert same(decoder.decode().cpu(), reference), f"cycle {cycle}: the logits differ"
            tidy([device])
            now = free(device)
            first = first if first is not None else now
            assert abs(now - first) <= NOISE, f"{first} bytes free after cycle 0, {now} now"
            phases.done("resume")
    return {"resident": held, "seconds": phases.seconds}


def main() -> None:
    """Parse the command line, run the scenario and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default="0", help="the devices' indices, separated by commas")
    parser.add_argument("--threads", type=int, default=1, help="number of threads for each device")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--kv-backup", choices=["host", "none"], default="host")
    parser.add_argument(
        "--expandable",
        choices=["yes", "no"],
        help="whether torch is expected to use expandable segments",
    )
    parser.add_argument(
        "--preloaded", choices=["yes", "no"], help="whether the library is expected to be preloaded"
    )
    parser.add_argument("--whole-process", action="store_true")
    options = parser.parse_args()
    options.devices = [int(part) for part in options.devices.split(",")]
    start = time.perf_counter()
    gc.freeze()  # garbage collections need not scan the imported modules
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    if options.preloaded:
        assert memsaver.is_preloaded() == (options.preloaded == "yes"), "the mode is another one"
    decoders = [
        Decoder(FULL if thread == 0 else SMALL, f"cuda:{device}", options.kv_backup)
        for device in options.devices
        for thread in range(options.threads)
    ]
    probe = torch.zeros(4 * MIB, device="cuda")
    if options.expandable:
        own = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == (0, 0)]
        assert {s["is_expandable"] for s in own} == {options.expandable == "yes"}
    del probe
    if options.whole_process:
        result = run_whole_process(options, decoders[0])
    else:
        result = run(options, decoders)
    result["total_s"] = round(time.perf_counter() - start, 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
