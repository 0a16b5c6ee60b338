"""Sends tensors between two ranks without an engine; exits with status 0 on success.

usage: buckets_child.py SCENARIO

The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.

In the scenario "region", rank 0 updates an engine that consists of rank 1. The engine maps rank 0's
tensors. In the other scenarios, the ranks write parts of tensors into each other's buckets.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROWS, COLUMNS = 1024, 4096
STEPS = 3
MIB = 1 << 20


def main(scene: str) -> None:
    if scene == "region":
        from_a_region()
    else:
        into_buckets(scene)
    print("held", flush=True)


def into_buckets(scene: str) -> None:
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


def tensors(seed: int) -> dict[str, Any]:
    """Return unsharded tensors on the host; the tensors are the same on both ranks."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def made() -> Any:
        return torch.randn(ROWS, COLUMNS, generator=generator)

    return {name: made() for name in ("rows", "columns", "strided", "host", "tag", "replica")}


def parts(whole: dict[str, Any], device: Any) -> dict[str, Any]:
    """Return this rank's parts; one part is on the host, and one is in a tag."""
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


# --- the scene "region" ---------------------------------------------------------------------------

SMALL, LARGE = 200, 8  # tensors in the region


def from_a_region() -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    if RANK == 0:
        try:
            update_the_other_rank()
        finally:
            asked(None)
    else:
        be_an_engine()
    dist.destroy_process_group()


def asked(question: Any) -> Any:
    """Send a request to rank 1 and return its answer."""
    import torch.distributed as dist

    dist.broadcast_object_list([question], 0)
    answer = [None]
    dist.broadcast_object_list(answer, 1)
    return answer[0]


class OtherRank:
    """The methods of a `Backend`, which send requests to rank 1."""

    tp_size = 1
    control = SimpleNamespace(check=lambda operation: None, status="awake", released=())
    maps = True  # False: as an engine that cannot map regions

    def maps_regions(self, timeout: float) -> bool:
        from memsaver._memory.sharing.wire import domain

        return self.maps and asked("domain") == domain() != ""

    def begin_update(self, timeout: float) -> None:
        pass

    end_update = begin_update

    def load_weights(self, load: Any) -> list[Any]:
        from memsaver.integrations.engine.weights.checks import RankCheck, raise_failure

        fields = asked((load.tensors.payloads[0], asdict(load.verification)))
        checks = [RankCheck.from_fields(fields)]
        raise_failure(checks)
        return checks

    def close(self) -> None:
        pass


def be_an_engine() -> None:
    """Load tensors into a float32 model until rank 0 sends no more requests."""
    import torch
    import torch.distributed as dist

    from memsaver._memory.sharing.wire import domain
    from memsaver.integrations.engine.weights.checks import VerificationRequest
    from memsaver.integrations.engine.weights.load_check import LoadCheck
    from memsaver.integrations.engine.weights.payloads import named_tensors

    model = torch.nn.Module()
    for name, shape in shapes().items():
        empty = torch.zeros(shape, device="cuda")
        model.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(weights: Any) -> None:
        for name, tensor in weights:
            getattr(model, name).data.copy_(tensor)

    def load(text: str, request: Any) -> Any:
        check = LoadCheck(VerificationRequest.from_fields(request), 0)
        try:
            check.run(model, named_tensors(text), load_weights, load_weights)
        except Exception as error:
            check.fail(error)
        check.synchronize()
        return asdict(check.found())

    while True:
        box = [None]
        dist.broadcast_object_list(box, 0)
        question: Any = box[0]
        if isinstance(question, tuple):
            answer = load(*question)
        elif question == "domain":
            answer = domain()
        else:
            answer = [float(p.double().sum()) for p in model.parameters()]
        dist.broadcast_object_list([answer], 1)
        if question is None:
            return


def shapes() -> dict[str, tuple[int, ...]]:
    named = {f"small_{at}": (64, 64 + at) for at in range(SMALL)}
    named.update({f"large_{at}": (4096, 8192) for at in range(LARGE)})
    return {**named, "strided": (512, 1024), "outside": (512, 1024)}


def update_the_other_rank() -> None:
    import torch

    import memsaver
    from memsaver.integrations.engine.errors import EngineError
    from memsaver.integrations.rollout import RolloutEngine
    from memsaver.integrations.rollout.weights import update

    def free() -> int:
        torch.cuda.synchronize()
        return int(torch.cuda.mem_get_info()[0])

    with memsaver.region("trainer", backup="host", shareable=True):
        state = {
            name: torch.empty(
                shape[::-1] if name == "strided" else shape,
                dtype=torch.bfloat16 if "large" in name else torch.float32,
                device="cuda",
            )
            for name, shape in shapes().items()
            if name != "outside"
        }
    state["strided"] = state["strided"].T
    state["outside"] = torch.empty(shapes()["outside"], device="cuda")
    nbytes = sum(t.nbytes for name, t in state.items() if name != "outside")
    backend = OtherRank()
    engine = RolloutEngine(backend, timeout=60)
    for step in range(2 * STEPS):
        backend.maps = step < STEPS
        for tensor in state.values():
            tensor.normal_()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        report = update(engine, state, verify="full" if step % STEPS == 0 else "off")
        peak = torch.cuda.max_memory_allocated() - before
        print(f"{report.seconds * 1e3:.1f} ms, peak {peak / MIB:.0f} MiB: {report}", flush=True)
        assert report.mapped == (SMALL + LARGE if backend.maps else 0), report
        if report.verify == "full":
            assert report.received == report.held == report.tensors and not report.unverified
        assert not backend.maps or peak <= report.bucket_bytes + MIB, peak
        before = free()
        start = time.monotonic()
        memsaver.pause("trainer")  # at once
        print(f"a pause at once: {(time.monotonic() - start) * 1e3:.1f} ms", flush=True)
        assert free() - before >= nbytes - 64 * MIB, "the engine keeps the memory"
        memsaver.resume("trainer")
        sums = [float(state[name].double().sum()) for name in shapes()]
        assert all(
            abs(a - b) < 1e-6 * (1 + abs(a)) for a, b in zip(sums, asked("sums"), strict=True)
        ), step
    backend.maps = True
    with memsaver.region("trainer", backup="host", shareable=True):
        wrong = {**state, "large_3": torch.ones(3, 5, device="cuda")}
    try:
        update(engine, wrong)
    except EngineError as error:
        print(error, flush=True)
    else:
        raise AssertionError("a wrong shape was loaded")
    memsaver.pause("trainer")
    memsaver.resume("trainer")
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1])
