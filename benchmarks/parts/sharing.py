"""Measure tensors sent to another process: from a shareable region, and by CUDA IPC.

share_16GB_ms is the time until another process has read the last byte of each of 16 tensors of
1 GB: pickling, unpickling with the mapping of the memory, and the kernels that read. Each time, the
memory is new to the other process: the region has been paused and resumed, or, with CUDA IPC, the
receiver has closed the memory. share_195_tensors_ms is the same for the 195 tensors of the decoder.

update_from_region_ms is the time of an update of an engine's 16 GB of weights on the same GPU:
once with one message about the trainer's own tensors in a region, from which the engine copies;
once through a bucket outside of regions, which the trainer fills and sends, and from which the
engine copies, bucket by bucket.

Each time is the sum of the two processes' own times; the transport of the pickle is left out.
"""

from __future__ import annotations

import argparse
import base64
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import comparison
import results
import workloads
from children import Child, Failed, attempt
from libraries import OURS
from serve import Worker
from workloads import MIB

IPC = "CUDA IPC of plain tensors"
BUCKET = "a bucket outside of regions"
BUCKET_BYTES = 512 << 20  # the default of memsaver.integrations.rollout.weights.update

TAG = "weights"


def _large() -> list[Any]:
    """Create 16 tensors of 1 GB."""
    import torch

    return [torch.empty(954 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]


MAKERS: dict[str, Callable[[], list[Any]]] = {"large": _large, "decoder": workloads.decoder}


def _ms(start: float) -> float:
    return 1000 * (time.perf_counter() - start)


def _fill(tensors: list[Any], seed: int) -> None:
    """Write contents that depend on the seed and the tensor's number."""
    import torch

    for number, tensor in enumerate(tensors):
        tensor.view(torch.uint8).fill_((seed + number) % 251)
    torch.cuda.synchronize()


def _last_bytes(tensors: list[Any]) -> list[int]:
    """Read the last byte of each tensor, with few kernels."""
    import torch

    found: list[int] = torch.stack([t.flatten().view(torch.uint8)[-1] for t in tensors]).tolist()
    return found


def _samples(tensors: list[Any]) -> list[int]:
    """Read one byte of each MiB of each tensor, and return each tensor's sum."""
    import torch

    sums = [tensor.flatten().view(torch.uint8)[::MIB].sum(dtype=torch.int64) for tensor in tensors]
    found: list[int] = torch.stack(sums).tolist()
    return found


def _expected(tensors: list[Any], seed: int) -> list[int]:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    return [(seed + n) % 251 * -(-size // MIB) for n, size in enumerate(sizes)]


class Sender(Worker):
    """Owns tensors, in a shareable region or outside of regions, and sends them."""

    def __init__(self, name: str, kind: str, in_region: bool) -> None:
        import memsaver

        workloads.start_cuda((0,))
        self._memsaver, self._in_region = memsaver, in_region
        self._seed = 0
        if in_region:
            with memsaver.region(TAG, backup="none", shareable=True):
                self._tensors = MAKERS[kind]()
        else:
            self._tensors = MAKERS[kind]()
        self._bucket: Any = None

    def renew(self) -> dict[str, Any]:
        """Replace the region's physical memory, and write new contents."""
        if self._in_region:
            self._memsaver.pause(TAG, backup="none")
            self._memsaver.resume(TAG)
        return self.change()

    def change(self) -> dict[str, Any]:
        """Write new contents; return the samples that the receiver must read."""
        self._seed += 1
        _fill(self._tensors, self._seed)
        return {"sums": _expected(self._tensors, self._seed)}

    def send(self) -> dict[str, Any]:
        """Pickle all tensors."""
        return self._sent(self._tensors, time.perf_counter())

    def fill_bucket(self, at: int) -> dict[str, Any]:
        """Copy tensors, from number `at` on, into the bucket, and pickle it.

        Returns:
            Also the number of tensors, and whether they are the last ones.
        """
        import torch

        if self._bucket is None:
            most = max(tensor.numel() * 2 for tensor in self._tensors)
            self._bucket = torch.empty(max(BUCKET_BYTES, most), dtype=torch.uint8, device="cuda")
        start = time.perf_counter()
        end, places = 0, []
        for tensor in self._tensors[at:]:
            nbytes = tensor.numel() * tensor.element_size()
            if places and end + nbytes > BUCKET_BYTES:
                break
            self._bucket[end : end + nbytes].view(tensor.dtype).copy_(tensor.flatten())
            places.append(end)
            end += -(-nbytes // 512) * 512
        torch.cuda.synchronize()
        return {**self._sent(self._bucket, start), "count": len(places), "places": places}

    def _sent(self, value: Any, start: float) -> dict[str, Any]:
        data = bytes(ForkingPickler.dumps(value))
        took = _ms(start)
        return {"ms": took, "data": base64.b64encode(data).decode()}


class Receiver(Worker):
    """Receives tensors, and reads them or copies them into weights of its own."""

    def __init__(self, name: str, weights: bool) -> None:
        workloads.start_cuda((0,))
        self._weights = workloads.decoder() if weights else []
        self._received: Any = None
        import torch

        small = [torch.zeros(4, dtype=torch.uint8, device="cuda")] * 195
        _last_bytes(small), _samples(small)  # loads the kernels

    def read(self, data: str) -> dict[str, Any]:
        """Unpickle tensors, and read each one; then, untimed, read a byte of each MiB."""
        pickled = base64.b64decode(data)
        start = time.perf_counter()
        self._received = pickle.loads(pickled)
        _last_bytes(self._received)
        took = _ms(start)
        return {"ms": took, "sums": _samples(self._received)}

    def load(self, data: str, at: int, places: list[int] | None = None) -> dict[str, Any]:
        """Unpickle tensors, or a bucket with tensors at these offsets, and copy them."""
        import torch

        pickled = base64.b64decode(data)
        start = time.perf_counter()
        self._received = pickle.loads(pickled)
        count = len(self._weights) if places is None else len(places)
        for number, weight in enumerate(self._weights[at : at + count]):
            if places is None:
                weight.copy_(self._received[number])
            else:
                end = places[number] + weight.numel() * weight.element_size()
                source = self._received[places[number] : end].view(weight.dtype)
                weight.copy_(source.reshape(weight.shape))
        torch.cuda.synchronize()
        return {"ms": _ms(start)}

    def sums(self) -> dict[str, Any]:
        """Return the samples of the weights."""
        return {"sums": _samples(self._weights)}

    def close(self) -> dict[str, Any]:
        """Delete the received tensors."""
        import torch

        self._received = None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        return {}


def _check(found: list[int], expected: list[int], what: str) -> None:
    if found != expected:
        raise Failed(f"{what}: the received contents differ")


def _share(kind: str, in_region: bool, cycles: int) -> list[float]:
    """Return the times until another process has read the tensors."""
    sender = Child("parts.sharing:Sender", OURS, kind=kind, in_region=in_region)
    with sender, Child("parts.sharing:Receiver", OURS, weights=False) as receiver:
        times = []
        for _ in range(cycles):
            expected = sender.ask("renew")["sums"]
            sent = sender.ask("send")
            read = receiver.ask("read", data=sent["data"])
            _check(read["sums"], expected, f"{kind}, in a region: {in_region}")
            receiver.ask("close")
            times.append(sent["ms"] + read["ms"])
        return times


def _update(in_region: bool, cycles: int) -> list[float]:
    """Return the times of updates of 16 GB of weights."""
    sender = Child("parts.sharing:Sender", OURS, kind="decoder", in_region=True)
    with sender, Child("parts.sharing:Receiver", OURS, weights=True) as receiver:
        times = []
        for _ in range(cycles):
            expected = sender.ask("change")["sums"]
            total, at = 0.0, 0
            while at < len(expected):
                sent = sender.ask("send") if in_region else sender.ask("fill_bucket", at=at)
                places = sent.get("places")
                loaded = receiver.ask("load", data=sent["data"], at=at, places=places)
                receiver.ask("close")
                total += sent["ms"] + loaded["ms"]
                at += sent.get("count", len(expected))
            _check(receiver.ask("sums")["sums"], expected, f"update, in a region: {in_region}")
            times.append(total)
        return times


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of share_* and update_from_region_ms."""
    for kind, metric in (("large", "share_16GB_ms"), ("decoder", "share_195_tensors_ms")):
        with attempt(failures):
            ours = _share(kind, True, options.cycles)
            comparison.show(metric, ours)
            yield results.measurement(metric, ours, IPC, _share(kind, False, options.cycles))
    with attempt(failures):
        ours = _update(True, options.cycles)
        comparison.show("update_from_region_ms", ours)
        theirs = _update(False, options.cycles)
        yield results.measurement("update_from_region_ms", ours, BUCKET, theirs)
