"""Runs a scenario with weight updates to several engines, or to an engine with replicas or stages.

usage: weight_sync_engines.py SCENARIO FOLDER

The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.
"""

from __future__ import annotations

import datetime
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

from rollout_child import RANK, SIZE, arguments, check_sleep, play
from trainer_weights import outputs, state
from weight_sync_child import BUCKET, check_updates, refused


def _ranks(gpus: int) -> Any:
    """Initialize the trainer's ranks with one GPU each; return torch.distributed."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(RANK % gpus)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=240))
    return dist


def parts(folder: Path, name: str) -> None:
    """Send weights to an engine whose two ranks are replicas or stages on the trainer ranks' GPUs.

    Args:
        folder: the scenario's folder.
        name: the engine's argument, either "dp_size" or "pp_size".
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from memsaver.integrations.rollout import RolloutEngine

    dist = _ranks(SIZE)
    mesh = init_device_mesh("cuda", (1, SIZE), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cuda", (SIZE,))

    def sharded(seed: int) -> dict[str, Any]:
        return {n: distribute_tensor(t, flat, [Shard(0)]) for n, t in state(seed).items()}

    named = arguments(folder)
    dist.barrier()
    with RolloutEngine.launch(mesh, **named, **{name: SIZE}, timeout=240) as engine:
        assert engine.tp_size == SIZE
        first = outputs(engine)
        check_updates(engine, first, state, verify="full", bucket_bytes=BUCKET)
        check_updates(engine, first, state, verify="sampled")
        check_updates(engine, first, sharded, verify="full")
        check_refusal_and_group(engine, first)
    dist.destroy_process_group()


def check_refusal_and_group(engine: Any, first: list[list[int]]) -> None:
    """Check that all ranks refuse an unknown name, then check updates through a gloo group."""
    from memsaver.integrations.rollout import WeightMismatchError
    from memsaver.integrations.rollout.weights import WeightGroup

    unknown = {**state(1), "no.such": state(1)["model.norm.weight"]}
    error = refused(WeightMismatchError, engine.update_weights, unknown)
    assert error.tensors == ("no.such",), error
    engine.update_weights(state(1), verify="full")
    assert outputs(engine) == first
    host = {seed: state(seed, device="cpu") for seed in (1, 2)}
    with WeightGroup(engine, backend="gloo", timeout=60) as group:
        check_group(engine, group, first, host)


def check_group(engine: Any, group: Any, first: list[list[int]], host: dict[int, Any]) -> None:
    """Check updates to new weights and back through a group."""
    for seed in (2, 1):
        report = engine.update_weights(host[seed], group=group, pause="abort", verify="full")
        assert report.held == report.tensors == report.received, report
        assert (outputs(engine) == first) == (seed == 1), seed


def mesh_group(folder: Path, gpus: int, backend: str = "gloo") -> None:
    """Send weights in one group to the engines of two ranks, on one or two GPUs.

    By default, NCCL accepts one rank per GPU, so NCCL needs another GPU for the sender.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from memsaver.integrations.rollout import RolloutEngine
    from memsaver.integrations.rollout.weights import WeightGroup

    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang: NCCL's ranks on a host must agree
    dist = _ranks(gpus)
    mesh = init_device_mesh("cuda", (SIZE,), mesh_dim_names=("dp",))
    named = {**arguments(folder), "port": 31000 + 200 * RANK}
    dist.barrier()
    if gpus == 1:  # SGLang measures free memory while it starts
        named.update(mem_fraction_static=0.3 + 0.2 * RANK, max_total_tokens=4096)
    device = f"cuda:{gpus}" if backend == "nccl" else "cpu"
    with RolloutEngine.launch(mesh, **named, timeout=240) as engine:
        first = outputs(engine)
        states = {seed: state(seed, device=device) for seed in (1, 2)}
        with WeightGroup(engine, backend=backend, timeout=60, whole_mesh=True) as group:
            check_group(engine, group, first, states)
        if backend == "gloo":  # with NCCL, the other engine waits until SGLang's own timeout
            check_failing_engine(engine, states[1])
            with WeightGroup(engine, backend=backend, timeout=60, whole_mesh=True) as group:
                check_group(engine, group, first, states)
        if gpus > 1:
            check_fence(engine, first, dist)
    dist.destroy_process_group()


def check_fence(engine: Any, first: list[list[int]], dist: Any) -> None:
    """Check that engines sleep and wake together, and that a failure on one rank raises an error on
    all ranks.
    """
    import torch
    from gpu_trainer import GIB, Trainer
    from sglang_checks import ROOM

    from memsaver.errors import MemsaverError
    from memsaver.integrations.engine.status import Status

    def free() -> list[int]:
        return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(SIZE)]

    awake = free()
    dist.barrier()
    engine.sleep(wait_idle=True, fence=True)
    gained = [now - then for now, then in zip(free(), awake, strict=True)]
    assert min(gained) > GIB, gained  # the other rank's engine is asleep, too
    dist.barrier()
    trainer = Trainer(RANK, ROOM, pattern=3) if RANK == SIZE - 1 else None
    dist.barrier()
    error = refused(MemsaverError, engine.wake_up, fence=True)
    assert f"rank {SIZE - 1}" in str(error) and "out of memory" in str(error), error
    assert engine.refresh() is (Status.AWAKE if trainer is None else Status.ASLEEP)
    if trainer is not None:
        assert trainer.is_intact()
        trainer.free()
    dist.barrier()
    engine.wake_up(fence=True)
    assert engine.refresh() is Status.AWAKE and outputs(engine) == first
    with engine.asleep(wait_idle=True, fence=True):
        dist.barrier()
        assert engine.status is Status.ASLEEP
    assert outputs(engine) == first


def engine_set(folder: Path) -> None:
    """Send weights in one group to two engines of a process, kill one engine, and update the
    other.
    """
    from memsaver.integrations.engine.errors import EngineError
    from memsaver.integrations.rollout import EngineSet, RolloutEngine, WeightMismatchError
    from memsaver.integrations.rollout.weights import WeightGroup

    dist = _ranks(1)
    named = {**arguments(folder), "timeout": 240}
    with RolloutEngine.launch(**named) as one, RolloutEngine.launch(**named) as other:
        first = outputs(one)
        assert outputs(other) == first
        engines = EngineSet([one, other])
        assert engines.tp_size == 2
        host = {seed: state(seed, device="cpu") for seed in (1, 2)}
        with WeightGroup(engines, backend="gloo", timeout=60) as group:
            for seed in (2, 1):
                report = engines.update_weights(
                    host[seed], group=group, pause="retract", verify="full", version=str(seed)
                )
                assert report.held == report.tensors == report.received, report
                found = [outputs(each) for each in engines.engines]
                assert found[0] == found[1] and (found[0] == first) == (seed == 1), seed
        unknown = {**host[1], "no.such": host[1]["model.norm.weight"].clone()}
        failed = WeightGroup(engines, backend="gloo", timeout=60)
        error = refused(WeightMismatchError, engines.update_weights, unknown, group=failed)
        assert error.tensors == ("no.such",) and "engine 1 of 2" in str(error), error
        failed.leave()
        with WeightGroup(engines, backend="gloo", timeout=60) as group:
            engines.update_weights(host[1], group=group, verify="full")
        for each in engines.engines:
            with each.asleep(wait_idle=True):
                pass
            assert outputs(each) == first
        group = WeightGroup(engines, backend="gloo", timeout=60)
        manager = other.backend.link.engine.tokenizer_manager
        os.kill(manager._subprocess_watchdog._processes[0].pid, signal.SIGKILL)
        began = time.monotonic()
        error = refused(EngineError, engines.update_weights, host[2], group=group, timeout=60)
        assert "engine 2 of 2" in str(error) and time.monotonic() - began < 60, error
        group.leave()
        rest = EngineSet([one])
        with WeightGroup(rest, backend="gloo", timeout=60) as group:
            for seed in (2, 1):
                rest.update_weights(host[seed], group=group, verify="full")
                assert (outputs(one) == first) == (seed == 1), seed
        time.sleep(3)  # SGLang's watchdog checks every second
    dist.destroy_process_group()


def check_failing_engine(engine: Any, weights: dict[str, Any]) -> None:
    """Check that an engine's failure aborts the update of all engines in the group."""
    from memsaver.integrations.engine.errors import EngineError
    from memsaver.integrations.rollout.weights import WeightGroup

    group = WeightGroup(engine, backend="gloo", timeout=60, whole_mesh=True)
    load = engine.backend.load_weights

    def fail(_: Any) -> Any:
        raise EngineError("this engine does not load")

    engine.backend.load_weights = fail if RANK == 1 else load
    error = refused(Exception, engine.update_weights, weights, group=group, timeout=60)
    assert "rank 1" in str(error) and "does not load" in str(error), error
    engine.backend.load_weights = load
    group.leave()


def check_wake_without_memory(engine: Any, first: list[list[int]], dist: Any) -> None:
    """Check that a wake-up fails on all nodes and maps nothing if the last node has too little
    memory.
    """
    import torch
    from gpu_trainer import MIB, Trainer
    from sglang_checks import ROOM

    from memsaver.errors import OutOfDeviceMemoryError
    from memsaver.integrations.engine.status import Status

    engine.sleep(wait_idle=True)
    trainer = Trainer(0, ROOM, pattern=7) if RANK == SIZE - 1 else None
    before = torch.cuda.mem_get_info(0)[0]
    dist.barrier()
    error = refused(OutOfDeviceMemoryError, engine.wake_up)
    for part in ("kv_cache", "out of memory", f"rank {SIZE - 1} of {SIZE}"):
        assert part in str(error), error
    assert engine.status is Status.ASLEEP and engine.refresh() is Status.ASLEEP
    taken = before - torch.cuda.mem_get_info(0)[0]
    assert taken < 256 * MIB, f"{taken} bytes are held after: {error}"
    if trainer is not None:
        assert trainer.is_intact()
        trainer.free()
    dist.barrier()
    engine.wake_up()
    assert outputs(engine) == first


def nodes(folder: Path) -> None:
    """Use an engine on two nodes; each rank has its own GPU and address, and no memory is shared.

    NCCL treats the ranks as different hosts, so their GPUs communicate through sockets.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[RANK]
    os.environ.update(CUDA_VISIBLE_DEVICES=visible, NCCL_HOSTID=f"node{RANK}")
    os.environ.update(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    from torch.distributed.device_mesh import init_device_mesh

    from memsaver.integrations.engine import placement
    from memsaver.integrations.rollout import RolloutEngine

    address = f"127.0.0.{1 + RANK}"
    placement.gpu_of_this_process = lambda: placement.Gpu(address, visible, 0)
    dist = _ranks(1)
    mesh = init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("dp", "tp"))
    named = {**arguments(folder), "disable_custom_all_reduce": True}
    dist.barrier()
    with RolloutEngine.launch(mesh, **named, timeout=240) as engine:
        assert engine.tp_size == SIZE
        first = outputs(engine)
        check_sleep(engine)
        check_wake_without_memory(engine, first, dist)
        check_updates(engine, first, state, verify="full", bucket_bytes=BUCKET)
        check_refusal_and_group(engine, first)
    dist.destroy_process_group()


SCENES = {
    "nodes": nodes,
    "engine_set": engine_set,
    "replicas": functools.partial(parts, name="dp_size"),
    "stages": functools.partial(parts, name="pp_size"),
    "one_gpu": functools.partial(mesh_group, gpus=1),
    "mesh": functools.partial(mesh_group, gpus=2),
    "mesh_nccl": functools.partial(mesh_group, gpus=2, backend="nccl"),
}


if __name__ == "__main__":
    play(SCENES)
