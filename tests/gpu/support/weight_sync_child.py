"""Runs a scenario in which a trainer sends weights to a real engine; exits with status 0 on
success.

usage: weight_sync_child.py SCENARIO FOLDER

The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from expected_errors import raises
from mapped_updates import check_mapped, check_offloaded, check_serializer
from rollout_child import (
    RANK,
    SIZE,
    STUCK_SECONDS,
    arguments,
    in_background,
    play,
    wait_until_generating,
)
from trainer_weights import in_the_engines_layout, outputs, state

MIB = 1 << 20
BUCKET = 24 * MIB


def check_updates(engine: Any, first: list[list[int]], sent: Any, **options: Any) -> None:
    """Check updates to new weights and back during wake-ups; the old output is restored exactly."""
    other = None
    for seed in (2, 1):
        engine.sleep(wait_idle=True)
        with engine.staged_wake():
            report = engine.update_weights(sent(seed), version=f"v{seed}", **options)
        assert report.version == f"v{seed}" and report.seconds > 0
        assert report.unverified == "" and report.received == report.held, report
        if options.get("verify") == "full":
            assert report.held == report.tensors, report
        print(f"{options}: {report.bytes / MIB:.0f} MiB in {report.seconds:.3f} s", flush=True)
        found = outputs(engine)
        assert (found == first) == (seed == 1), (options, seed)
        other = other or found
    assert all(new != old for new, old in zip(other, first, strict=True))


def refused(kind: Any, call: Any, *args: Any, **named: Any) -> Any:
    with raises(kind) as caught:
        call(*args, **named)
    return caught[0]


def check_memory(engine: Any) -> None:
    """Check that an update needs only one bucket of additional memory, and releases the bucket."""
    import torch

    weights = state(1)
    largest = max(t.nbytes for t in weights.values())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    report = engine.update_weights(weights, bucket_bytes=BUCKET, verify="full")
    peak = torch.cuda.max_memory_allocated() - before
    assert report.bucket_bytes <= max(BUCKET, largest) and peak <= report.bucket_bytes + MIB, peak
    assert torch.cuda.memory_allocated() == before


def check_regions(engine: Any, first: list[list[int]]) -> None:
    """Check updates from weights in a tag.

    The weights are copied, because pausable memory cannot be shared.
    """
    import memsaver

    with memsaver.region("trainer", backup="host"):
        weights = {name: t.clone() for name, t in state(1).items()}
        engine.update_weights(weights, verify="full")  # while a region is open
    assert outputs(engine) == first
    memsaver.pause("trainer")
    from memsaver.errors import InvalidStateError

    error = refused(InvalidStateError, engine.update_weights, weights)
    assert error.tag == "trainer" and outputs(engine) == first
    memsaver.resume("trainer")
    engine.update_weights(weights, verify="full")
    assert outputs(engine) == first


def check_bad(engine: Any, first: list[list[int]], folder: Path) -> None:
    """Check that a mismatched tensor raises an error with its name, and that the engine still
    works.
    """
    import torch

    from memsaver.integrations.rollout import WeightMismatchError
    from memsaver.integrations.rollout.weights import updates
    from memsaver.integrations.sglang import EngineError

    weights = state(1)
    name = "model.layers.1.self_attn.k_proj.weight"
    bad = {**weights, name: torch.ones(3, 5, device="cuda", dtype=torch.bfloat16)}
    error = refused(EngineError, engine.update_weights, bad)
    assert "rank 0" in str(error), error
    error = refused(WeightMismatchError, engine.update_weights, {"model.nope": weights[name]})
    assert error.tensors == ("model.nope",), error

    taken = updates.digests_of

    def and_then_changed(views: Any, places: Any) -> Any:
        digests = taken(views, places)
        for its_name, _, view in views:
            if its_name == name:
                view[3, 4] += 1
        return digests

    updates.digests_of = and_then_changed
    error = refused(WeightMismatchError, engine.update_weights, weights, verify="full")
    updates.digests_of = taken
    assert error.tensors == (name,), error

    flag = Path(os.environ["MEMSAVER_TEST_CORRUPTS"])
    flag.write_text("model.layers.2.mlp.gate_up_proj.weight")
    error = refused(WeightMismatchError, engine.update_weights, weights, verify="full")
    flag.unlink()
    assert error.tensors == ("model.layers.2.mlp.up_proj.weight",), error

    # One bit in each of three bytes: the first, one at an odd offset, and the last.
    row = weights["model.layers.2.mlp.up_proj.weight"].nbytes
    for byte in (0, row - 1, row, 2 * row - 1):
        flag.write_text(f"model.layers.2.mlp.gate_up_proj.weight {byte}")
        error = refused(WeightMismatchError, engine.update_weights, weights, verify="full")
        part = "up" if byte >= row else "gate"
        assert error.tensors == (f"model.layers.2.mlp.{part}_proj.weight",), (byte, error)
    flag.unlink()
    engine.update_weights(weights, verify="full")
    assert outputs(engine) == first


def alone(folder: Path) -> None:
    """Send weights through CUDA IPC to an engine on the same GPU."""
    import torch

    from memsaver.integrations.rollout import RolloutEngine

    torch.cuda.set_device(0)
    with RolloutEngine.launch(**arguments(folder), timeout=240) as engine:
        first = outputs(engine)
        check_updates(engine, first, state, verify="full", bucket_bytes=BUCKET)
        check_updates(engine, first, state, verify="sampled")
        check_updates(engine, first, state, verify="off")
        in_float32 = functools.partial(state, device="cuda", dtype=torch.float32)
        check_updates(engine, first, in_float32, verify="full")
        check_updates(engine, first, lambda seed: state(seed, device="cpu"), verify="full")
        check_updates(engine, first, in_the_engines_layout, layout="engine", verify="full")
        check_memory(engine)
        check_regions(engine, first)
        check_mapped(engine, first)
        check_offloaded(engine, first)
        check_serializer()
        check_bad(engine, first, folder)


def session(folder: Path) -> None:
    """Run the steps of a session, including updates that rewrite all weights and steps with
    overlap.

    An engine whose weights are rewritten neither saves nor restores the weights.
    """
    import torch

    from memsaver.integrations.rollout import ColocatedSession, RolloutEngine, Stage

    torch.cuda.set_device(0)
    names = list(state(1))
    model = torch.nn.ParameterList([torch.nn.Parameter(t) for t in state(1).values()])
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def train(seed: int) -> None:
        with torch.no_grad():
            for parameter, tensor in zip(model, state(seed).values(), strict=True):
                parameter.copy_(tensor)
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    with RolloutEngine.launch(**arguments(folder), timeout=240) as engine:
        first = outputs(engine)
        for rewrites in (False, True):
            options: dict[str, Any] = {"whole_updates": rewrites, "overlap": rewrites}
            options["state"] = lambda: dict(zip(names, (p.data for p in model), strict=True))
            made = ColocatedSession(engine, model, optimizer, **options)
            copied = []
            for seed in (2, 1, 2, 1):
                with made.training():
                    train(seed)
                with made.rollout():
                    assert (outputs(engine) == first) == (seed == 1), (rewrites, seed)
                reports = [
                    r.result for r in made.stages if r.stage in (Stage.SLEEP, Stage.WAKE_WEIGHTS)
                ]
                ranks = [rank for report in reports for step in report.steps for rank in step.ranks]
                assert len(reports) == 2 and ranks, made.stages
                copied.append(sum(rank.copied_bytes.get("weights", 0) for rank in ranks))
            print(f"rewrites {rewrites}: copied {copied}", flush=True)
            assert all(copied) if not rewrites else not any(copied[1:]), copied
            with made.training():
                pass  # resumes the trainer's memory: a session cannot be closed while it is paused
            made.close()


def check_leaving(engine: Any, backend: str, weights: dict[str, Any]) -> None:
    """Check that closed groups leave no threads or listening sockets and, with gloo, no
    descriptors.
    """
    from memsaver.integrations.rollout.weights import WeightGroup

    sys.path.append(str(Path(__file__).parents[2] / "support"))
    from descriptors import open_descriptors
    from process_sockets import eventually, listening, threads

    def held() -> tuple[int, list[str], int]:
        # NCCL keeps one socket, which does not listen, for each communicator that has ended.
        kept = len(open_descriptors()) if backend == "gloo" else 0
        return kept, listening(), len(threads())

    seen = []
    for _ in range(3):  # in the first round, libraries open their permanent resources
        with WeightGroup(engine, backend=backend, timeout=60) as group:
            engine.update_weights(weights, group=group, pause="retract")
            assert listening()
        if seen:
            eventually(held, seen[0])
        seen.append(held())


def group(folder: Path, backend: str = "gloo") -> None:
    """Send weights through a process group: gloo, or NCCL from another GPU."""
    import torch
    import torch.distributed as dist

    from memsaver.integrations.rollout import RolloutEngine
    from memsaver.integrations.rollout.weights import WeightGroup

    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang: NCCL's ranks on a host must agree
    torch.cuda.set_device(0)
    own = {"device": "cuda:1"} if backend == "nccl" else {"device": "cpu"}
    if backend == "nccl":  # as in a trainer: torch splits other communicators off this one
        dist.init_process_group(
            "nccl",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            device_id=torch.device(own["device"]),
        )
    with RolloutEngine.launch(**arguments(folder), timeout=240) as engine:
        first = outputs(engine)
        states = {seed: state(seed, **own) for seed in (1, 2)}  # slower than a generation
        check_leaving(engine, backend, states[1])
        with WeightGroup(engine, backend=backend, timeout=60) as sending:
            for mode in ("abort", "retract", "in_place"):
                for seed in (2, 1):
                    version = f"{mode} {seed}"
                    work, results = in_background(engine, 3000)
                    wait_until_generating(engine, work)
                    report = engine.update_weights(
                        states[seed], group=sending, pause=mode, verify="full", version=version
                    )
                    assert report.held == report.tensors == report.received, report
                    work.join(60)
                    (output,) = results
                    ended = "abort" if mode == "abort" else "length"
                    assert output.finish_reasons == (ended,), (mode, output.finish_reasons)
                    if mode != "abort":  # the request was in flight during the update
                        assert output.weight_version == version, output.weight_version
                    if mode == "in_place":  # the prefix cache mixes several versions' prefixes
                        engine.update_weights(states[seed], group=sending)
                    assert (outputs(engine) == first) == (seed == 1), (mode, seed)
    if backend == "nccl":
        dist.destroy_process_group()


def two(folder: Path) -> None:
    """Send weights from two FSDP2 ranks to a two-rank engine on the same GPUs."""
    import datetime

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from memsaver.integrations.rollout import RolloutEngine, WeightMismatchError

    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=240))
    mesh = init_device_mesh("cuda", (1, SIZE), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh("cuda", (SIZE,))

    def sharded(seed: int) -> dict[str, Any]:
        return {n: distribute_tensor(t, flat, [Shard(0)]) for n, t in state(seed).items()}

    named = arguments(folder)
    dist.barrier()
    with RolloutEngine.launch(mesh, **named, timeout=240) as engine:
        first = outputs(engine)
        check_updates(engine, first, sharded, verify="full", bucket_bytes=BUCKET)
        check_updates(engine, first, state, verify="sampled")
        flag = Path(os.environ["MEMSAVER_TEST_CORRUPTS"])
        if RANK == 0:
            flag.write_text("model.layers.0.self_attn.qkv_proj.weight")
        dist.barrier()
        error = refused(WeightMismatchError, engine.update_weights, sharded(1), verify="full")
        assert error.tensors == ("model.layers.0.self_attn.v_proj.weight",), error
        dist.barrier()
        if RANK == 0:
            flag.unlink()
        dist.barrier()
        engine.update_weights(sharded(1), verify="full")
        assert outputs(engine) == first
    dist.destroy_process_group()


def whole_process(folder: Path) -> None:
    """Update a server from a preloaded trainer, all of whose memory is in a region."""
    import sglang_engines

    import memsaver

    session = sglang_engines.start("server", folder)
    try:
        child = Path(__file__).with_name("whole_process_child.py")
        subprocess.run(
            [sys.executable, str(child), session.url],
            env={**os.environ, **memsaver.preload_env("trainer", backup="host")},
            check=True,
            timeout=STUCK_SECONDS,
        )
        assert session.outputs() == session.expected
    finally:
        session.close()


SCENES = {
    "alone": alone,
    "whole_process": whole_process,
    "session": session,
    "group": group,
    "group_nccl": functools.partial(group, backend="nccl"),
    "two": two,
}


if __name__ == "__main__":
    here = str(Path(__file__).with_name("corrupting"))
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["MEMSAVER_TEST_CORRUPTS"] = str(Path(sys.argv[2]) / "corrupts")
    play(SCENES)
