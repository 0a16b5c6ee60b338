"""Record a timeline of a rollout engine and a trainer whose combined memory exceeds the GPU's.

    python benchmarks/shared_gpu.py [--steps 2] [--out benchmarks/results/shared_gpu.json]

The steps are those of an RL framework: generate, put the engine to sleep, train, wake the weights,
update them, put the trainer to sleep, wake the KV cache. The engine's weights (16 GiB, with a
backup), KV cache and graph, and the trainer's states (with a backup) are torch tensors in tags;
kernels use them in every phase. The program writes the `memsaver.timeline()` of all steps except
the first. The first step allocates the memory for the backups. `memsaver trace FILE --picture
shared_gpu.svg` draws the timeline.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import memsaver

GIB = 1 << 30
ROOT = Path(__file__).parent.parent
WEIGHTS, TRAINER = 16 * GIB, 48 * GIB
SPARE = 6 * GIB  # for torch, cuBLAS and the driver


def filled(nbytes: int, value: int) -> list[torch.Tensor]:
    """Return tensors of 1 GiB each, filled with `value`."""
    count = nbytes // GIB
    return [torch.full((GIB // 4,), value, dtype=torch.int32, device="cuda") for _ in range(count)]


def work(tensors: list[torch.Tensor], seconds: float, add: int = 0) -> None:
    """Read the tensors repeatedly, then add a number to each element."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for tensor in tensors:
            tensor.max()
        torch.cuda.synchronize()
    for tensor in tensors if add else []:
        tensor.add_(add)
    torch.cuda.synchronize()


def without_root(saved: str) -> str:
    """Return a saved timeline with the callers' paths relative to the source tree."""
    return saved.replace(f"{ROOT.resolve()}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/shared_gpu.json")
    options = parser.parse_args()

    torch.zeros(1, device="cuda")
    free = memsaver.device_memory()[0]
    cache = (free - WEIGHTS - SPARE) // GIB * GIB
    if cache < TRAINER:
        parser.error(f"{free / GIB:.0f} GiB are free: too little for this to show anything")
    graph = torch.cuda.CUDAGraph()
    with memsaver.region("trainer", backup="host"):
        trainer = filled(TRAINER, 1)
    memsaver.pause("trainer")
    with memsaver.region("weights", backup="host"):
        weights = filled(WEIGHTS, 1)
    with memsaver.region("kv_cache", backup="none"):
        kv = filled(cache, 1)
    with memsaver.graph(graph, tag="cuda_graph"):
        total = torch.stack([tensor[:1024].max() for tensor in weights]).sum()

    def step(number: int) -> None:
        work(kv, 0.6)  # generates
        graph.replay()
        assert total.item() == number * len(weights)
        memsaver.swap(out=("kv_cache", "cuda_graph", "weights"), into="trainer")
        work(trainer, 0.8, add=1)  # trains
        memsaver.resume("weights")
        for tensor in weights:  # the update
            tensor.add_(1)
        memsaver.pause("trainer")
        memsaver.resume("kv_cache", "cuda_graph")

    step(1)
    with memsaver.timeline(interval=0.01) as recorded:
        for number in range(2, options.steps + 2):
            step(number)
        work(kv, 0.3)
    memsaver.swap(out="kv_cache", into="trainer")
    for kept in (*trainer, *weights):
        assert int(kept.min()) == int(kept.max()) == options.steps + 2
    recorded.save(options.out)
    options.out.write_text(without_root(options.out.read_text()))
    print(f"{(WEIGHTS + TRAINER + cache) / GIB:.0f} GiB of tensors, none of them lost")


if __name__ == "__main__":
    main()
