"""Write parts of tensors into the buckets of two ranks; exit with status 0 on success.

usage: buckets_child.py SCENE, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
"""

from __future__ import annotations

import os
import sys
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROWS, COLUMNS = 1024, 4096
STEPS = 3


def main(scene: str) -> None:
    if scene == "own_gpu":  # each rank sees one GPU only
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[RANK]
    import torch
    import torch.distributed as dist

    from memsaver.integrations.rollout.weights.buckets import buckets_of
    from memsaver.integrations.rollout.weights.colocated import BucketMemory
    from memsaver.integrations.rollout.weights.sources import sources_of

    device = torch.device("cuda", RANK if scene == "two_gpus" else 0)
    torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    allocated = []
    for step in range(STEPS):
        whole = tensors(step)
        sources = {source.spec.name: source for source in sources_of(parts(whole, device))}
        specs = [source.spec for source in sources.values()]
        (bucket,) = buckets_of([(spec.name, spec.nbytes) for spec in specs], 1 << 40)
        with BucketMemory(bucket.nbytes, device, True) as memory:
            texts: list[list[str]] = [[]] * SIZE
            dist.all_gather_object(texts, memory.shared(SIZE - 1))
            memory.open([text for rank, (text,) in enumerate(texts) if rank != RANK])
            dist.barrier()
            views = memory.write(bucket, sources)
            memory.settle()
            dist.barrier()
            wrong = [name for name, _, view in views if not torch.equal(view.cpu(), whole[name])]
            assert not wrong, (step, wrong)
            memory.close_others()
            dist.barrier()
            del views
        del sources
        torch.cuda.ipc_collect()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1:] == allocated[:-1], allocated
    if scene == "two_gpus":
        assert not torch._C._cuda_hasPrimaryContext(1 - RANK), "a context on the other GPU"
    dist.destroy_process_group()
    print("held", flush=True)


def tensors(seed: int) -> dict[str, Any]:
    """Return whole tensors on the host, equal on both ranks."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def made() -> Any:
        return torch.randn(ROWS, COLUMNS, generator=generator)

    return {name: made() for name in ("rows", "columns", "strided", "host", "tag", "replica")}


def parts(whole: dict[str, Any], device: Any) -> dict[str, Any]:
    """Return this rank's parts, of which one is on the host, and one in a tag."""
    import memsaver
    from memsaver.integrations.rollout.weights import Part

    shape = (ROWS, COLUMNS)
    begin = RANK * ROWS // SIZE
    rows = slice(begin, begin + ROWS // SIZE)
    columns = slice(RANK * COLUMNS // SIZE, (RANK + 1) * COLUMNS // SIZE)
    with memsaver.region("trainer", backup="host"):
        tagged = whole["tag"][:, columns].contiguous().to(device)
    return {
        "rows": Part(whole["rows"][rows].to(device), shape, (begin,)),
        "columns": Part(whole["columns"][:, columns].to(device), shape, (0, columns.start)),
        "strided": Part(whole["strided"][rows].T.contiguous().to(device).T, shape, (begin,)),
        "host": Part(whole["host"][:, columns], shape, (0, columns.start)),
        "tag": Part(tagged, shape, (0, columns.start)),
        "replica": Part(whole["replica"].to(device), shape),
    }


if __name__ == "__main__":
    main(sys.argv[1])
