"""Measure transfers of tensors to another process, through shareable regions and CUDA IPC.

share_16GB_ms is the time until another process has read the last byte of each of 16 tensors of 1
GB. This time includes pickling, unpickling, mapping the memory, and running the kernels that read
it. In each measurement, the memory is new to the other process: the region was paused and resumed
or, with CUDA IPC, the receiver closed its mapping. The tensors are sent --gap seconds later, so
that the driver can clear the released memory. share_195_tensors_ms is the same for the decoder's
195 tensors.

Each of these times is the sum of the times in both processes, excluding the transport of the
pickled data.

update_from_region_ms is the duration of `memsaver.integrations.rollout.weights.update` for 16 GB of
weights without verification. The engine is a process on the same GPU that copies the received
tensors into its own tensors. The trainer's tensors are in a shareable region. The tensors are sent
in two ways: in place, and in buckets outside regions. Buckets are used if the engine does not
report that it can map regions.
"""

from __future__ import annotations

import argparse
import base64
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import comparison
import results
import workloads
from children import Child, Failed, attempt
from libraries import OURS
from serve import Worker
from workloads import MIB

IPC = "CUDA IPC of plain tensors"
BUCKET = "buckets outside of regions"

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
    """A worker that owns tensors, in a shareable region or outside regions, and sends them."""

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
        self._engine: Any = None

    def renew(self) -> dict[str, Any]:
        """Replace the region's physical memory, and write new contents."""
        if self._in_region:
            self._memsaver.pause(TAG, backup="none")
            self._memsaver.resume(TAG)
        return self.change()

    def change(self) -> dict[str, Any]:
        """Write new contents; return the samples that the receiver is expected to read."""
        self._seed += 1
        _fill(self._tensors, self._seed)
        return {"sums": _expected(self._tensors, self._seed)}

    def send(self) -> dict[str, Any]:
        """Pickle all tensors."""
        start = time.perf_counter()
        data = bytes(ForkingPickler.dumps(self._tensors))
        return {"ms": _ms(start), "data": base64.b64encode(data).decode()}

    def update(self, maps: bool) -> dict[str, Any]:
        """Change the tensors, and update the engine, which maps the tensors or receives buckets."""
        from memsaver.integrations.rollout import RolloutEngine

        if self._engine is None:
            self._engine = RolloutEngine(
                _Backend(Child("parts.sharing:Receiver", OURS, weights=True))
            )
        backend = self._engine.backend
        backend.maps = maps
        expected = self.change()["sums"]
        state = {str(number): tensor for number, tensor in enumerate(self._tensors)}
        report = self._engine.update_weights(state, verify="off")
        assert (report.mapped, report.buckets > 0) == (maps * len(state), not maps), report
        found = backend.receiver.ask("sums")["sums"]
        return {"ms": 1000 * report.seconds, "sums": found, "expected": expected}

    def close(self) -> dict[str, Any]:
        """Shut the engine down."""
        if self._engine is not None:
            self._engine.close()
        return {}


class _Backend:
    """A rollout engine's `Backend` that sends weights to a `Receiver`.

    Attributes:
        receiver: the receiver's process.
        maps: whether the receiver reports that it can map shareable regions.
    """

    tp_size = 1
    control = SimpleNamespace(check=lambda operation: None, status="awake", released=())

    def __init__(self, receiver: Child) -> None:
        self.receiver, self.maps = receiver, True
        receiver.ready()

    def maps_regions(self, timeout: float) -> bool:
        return self.maps

    def begin_update(self, timeout: float) -> None:
        pass

    def end_update(self, timeout: float, complete: bool = True) -> None:
        pass

    def load_weights(self, load: Any) -> list[Any]:
        self.receiver.ask("load", load.timeout, payload=load.tensors.payloads[0])
        return []

    def close(self) -> None:
        self.receiver.close()


class Receiver(Worker):
    """A worker that receives tensors and either reads them or copies them into its own weights."""

    def __init__(self, name: str, weights: bool) -> None:
        workloads.start_cuda((0,))
        self._weights = workloads.decoder() if weights else []
        self._received: Any = None
        import torch

        small = [torch.zeros(4, dtype=torch.uint8, device="cuda")] * 195
        _last_bytes(small), _samples(small)  # loads the kernels

    def read(self, data: str) -> dict[str, Any]:
        """Unpickle and read tensors, and measure the time; then read one byte of each MiB."""
        pickled = base64.b64decode(data)
        start = time.perf_counter()
        self._received = pickle.loads(pickled)
        _last_bytes(self._received)
        took = _ms(start)
        return {"ms": took, "sums": _samples(self._received)}

    def load(self, payload: str) -> dict[str, Any]:
        """Copy each tensor into the weight whose number is the tensor's name."""
        import torch

        from memsaver.integrations.engine.weights.payloads import named_tensors

        for name, tensor in named_tensors(payload):
            self._weights[int(name)].copy_(tensor)
        torch.cuda.synchronize()
        return {}

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


def _share(kind: str, in_region: bool, options: argparse.Namespace) -> list[float]:
    """Return the times until another process has read the tensors."""
    sender = Child("parts.sharing:Sender", OURS, kind=kind, in_region=in_region)
    with sender, Child("parts.sharing:Receiver", OURS, weights=False) as receiver:
        times = []
        for _ in range(options.cycles):
            expected = sender.ask("renew")["sums"]
            time.sleep(options.gap)  # the driver clears the memory that was released
            sent = sender.ask("send")
            read = receiver.ask("read", data=sent["data"])
            _check(read["sums"], expected, f"{kind}, in a region: {in_region}")
            receiver.ask("close")
            times.append(sent["ms"] + read["ms"])
        return times


def _update(maps: bool, cycles: int) -> list[float]:
    """Return the times of updates of 16 GB of weights."""
    with Child("parts.sharing:Sender", OURS, tree=True, kind="decoder", in_region=True) as sender:
        times = []
        for _ in range(cycles):
            updated = sender.ask("update", maps=maps)
            _check(updated["sums"], updated["expected"], f"an update, mapped: {maps}")
            times.append(updated["ms"])
        sender.ask("close")
        return times


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for share_* and update_from_region_ms."""
    for kind, metric in (("large", "share_16GB_ms"), ("decoder", "share_195_tensors_ms")):
        with attempt(failures):
            ours = _share(kind, True, options)
            comparison.show(metric, ours)
            yield results.measurement(metric, ours, IPC, _share(kind, False, options))
    with attempt(failures):
        ours = _update(True, options.cycles)
        comparison.show("update_from_region_ms", ours)
        theirs = _update(False, options.cycles)
        yield results.measurement("update_from_region_ms", ours, BUCKET, theirs)
