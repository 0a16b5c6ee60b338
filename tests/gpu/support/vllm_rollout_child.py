"""Runs a scenario with a vLLM rollout engine; exits with status 0 on success.

usage: vllm_rollout_child.py SCENARIO FOLDER; the scenario "two" needs RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT

vLLM's processes import this file again, so the file imports only modules that every process needs.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STUCK_SECONDS = 300
GIB = 1 << 30
TOKENS = 24
BUCKET = 24 << 20
PROMPTS = ([5, 6, 7, 8, 901, 44], [9, 10, 11], list(range(3000, 3100)))
LEFT = 256 << 20  # of this process, which has loaded kernels since its first reading


def greedy(tokens: int = TOKENS, **others: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "seed": 1, **others}


def arguments(folder: Path, seed: int = 1, **others: Any) -> dict[str, Any]:
    """Save the model with weights that depend on a seed; return the engine's arguments."""
    import qwen_model
    import vllm_engines

    path = folder / f"model-{seed}"
    if not path.exists():
        qwen_model.save(path, qwen_model.weights(seed=seed))
    common = {k: v for k, v in vllm_engines.COMMON.items() if k != "worker_extension_cls"}
    return {**common, "enable_prefix_caching": True, "model": str(path), **others}


def weights(seed: int) -> dict[str, Any]:
    """Return a trainer's weights on the GPU."""
    import qwen_model

    parts = qwen_model.weights(seed=seed)
    return {name: tensor.cuda() for part in parts for name, tensor in part.items()}


@contextmanager
def launched(folder: Path, seed: int = 1, **others: Any) -> Iterator[Any]:
    from memsaver.integrations.rollout import RolloutEngine

    begin = time.monotonic()
    with RolloutEngine.launch(kind="vllm", timeout=200, **arguments(folder, seed, **others)) as one:
        print(f"--- the engine is up after {time.monotonic() - begin:.1f} s", flush=True)
        yield one


def outputs(engine: Any) -> list[list[int]]:
    """Return greedy tokens for one prompt at a time, because batches change the arithmetic."""
    found = []
    for prompt in PROMPTS:
        assert engine.backend.link.flush(10)
        output = engine.generate([prompt], greedy())
        assert bool((output.logprobs[0] <= 0).all()) and output.lengths.tolist() == [TOKENS]
        found.append(output.token_ids[0].tolist())
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS), found
    return found


def free() -> int:
    import torch

    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def timed(name: str, report: Any) -> Any:
    print(f"--- {name}: {report.seconds * 1e3:.1f} ms, {report.bytes >> 20} MiB", flush=True)
    return report


def check_sleep(engine: Any, expected: list[list[int]]) -> None:
    """Put the engine to sleep, wake it in stages, and let tags sleep; the output stays the same."""
    from memsaver.integrations.engine.status import Status

    awake = free()
    for _ in range(2):
        report = timed("sleep", engine.sleep(wait_idle=True))
        assert engine.status is Status.ASLEEP and report.bytes > GIB
        assert free() - awake > GIB, (free(), awake)
        check_held(report.held)
        with engine.staged_wake() as reports:
            assert engine.status is Status.WEIGHTS_ONLY
        first, second = (timed("wake-up", one).changed for one in reports)
        assert first == ("weights",) and "kv_cache" in second
        assert engine.status is Status.AWAKE and outputs(engine) == expected
    engine.sleep("kv_cache")
    assert engine.status is Status.WEIGHTS_ONLY
    engine.sleep("weights")
    assert engine.status is Status.ASLEEP
    engine.wake_up("kv_cache")
    assert engine.status is Status.NO_WEIGHTS
    engine.wake_up()
    assert engine.status is Status.AWAKE and outputs(engine) == expected


def check_held(held: dict[str, int]) -> None:
    """Check the memory that a sleeping engine without pausable graphs still uses."""
    print(f"--- held: { {name: size >> 20 for name, size in held.items()} } MiB", flush=True)
    assert held["tags"] == 0 and held["graphs"] > 0 and 0 < held["rest"] < 2 * GIB, held
    assert sum(held.values()) < 4 * GIB, held


def check_unsaved(engine: Any, old: list[list[int]]) -> None:
    """Weights that will be sent again are neither saved nor restored."""
    engine.sleep(wait_idle=True)
    timed("wake-up without contents", engine.wake_up("weights", keep_weights=False))
    engine.update_weights(weights(1), bucket_bytes=BUCKET, verify="full")
    engine.wake_up()
    assert outputs(engine) == old
    timed("sleep without a copy", engine.sleep(wait_idle=True, keep_weights=False))
    engine.wake_up("weights")
    engine.update_weights(weights(1), bucket_bytes=BUCKET, verify="full")
    engine.wake_up()
    assert outputs(engine) == old


def check_updates(engine: Any, old: list[list[int]], new: list[list[int]]) -> None:
    """Load and verify new weights; no rank loads a bucket that arrives corrupted."""

    report = engine.update_weights(
        weights(2), version="2", bucket_bytes=BUCKET, verify="full", flush_cache=True
    )
    print(f"--- update: {report}", flush=True)
    assert report.buckets > 2 and report.received == report.held == report.tensors, report
    assert not report.unverified, report
    assert outputs(engine) == new
    assert engine.generate([PROMPTS[0]], greedy(2)).weight_version == "2"
    check_damaged(engine, weights(1))
    assert outputs(engine) == new
    engine.sleep(wait_idle=True)
    with engine.staged_wake():
        engine.update_weights(weights(1), version="1", bucket_bytes=BUCKET)
    assert outputs(engine) == old


def check_mapped(engine: Any, old: list[list[int]], new: list[list[int]]) -> None:
    """Update weights from a shareable region whose tensors the engine's process maps."""
    import memsaver

    with memsaver.region("shared", backup="host", shareable=True):
        state = {name: tensor.clone() for name, tensor in weights(1).items()}
    for seed in (2, 1):
        for name, tensor in weights(seed).items():
            state[name].copy_(tensor)
        report = timed("update from a region", engine.update_weights(state, verify="full"))
        assert report.mapped == report.received == report.held == report.tensors, report
        assert report.buckets == 0 and not report.unverified, report
        memsaver.pause("shared")  # at once
        assert outputs(engine) == (old if seed == 1 else new)
        memsaver.resume("shared")


def check_damaged(engine: Any, state: dict[str, Any], ranks: int = 1) -> None:
    """Check that an update fails if its buckets arrive corrupted on the engine's last rank."""
    with damaged(engine.backend, ranks):
        check_mismatch(engine, state)


def check_mismatch(engine: Any, state: dict[str, Any]) -> None:
    """Check that an update fails if tensors that should be equal differ."""
    from memsaver.integrations.rollout import WeightMismatchError

    try:
        engine.update_weights(state, bucket_bytes=BUCKET, verify="full")
    except WeightMismatchError as error:
        print(f"--- {error}", flush=True)
    else:
        raise AssertionError("different weights were loaded")


@contextmanager
def damaged(backend: Any, ranks: int = 1) -> Iterator[None]:
    """Change a digest in each bucket for the last rank, as if the tensor had been corrupted in
    transit.

    Args:
        backend: the rank's backend, or None if the rank has no backend.
        ranks: the engine's number of ranks.
    """
    if backend is None:
        yield
        return
    from dataclasses import replace

    load = backend.load_weights

    def other(one: Any) -> Any:
        sent = one.verification.sent
        rows = list(sent) if len(sent) > 1 else [*sent] * ranks  # a single row is for all ranks
        rows[-1] = ("0" * len(rows[-1][0]), *rows[-1][1:])
        return load(replace(one, verification=replace(one.verification, sent=tuple(rows))))

    backend.load_weights = other
    try:
        yield
    finally:
        del backend.load_weights


def check_pauses(engine: Any) -> None:
    """Pause a generation in each mode: abort, keep and recompute."""
    for mode in ("abort", "in_place", "retract"):
        results: list[Any] = []
        work = threading.Thread(
            target=lambda found=results: found.append(engine.generate([PROMPTS[0]], greedy(1500)))
        )
        work.start()
        states = engine.backend.link.states
        deadline = time.monotonic() + 20
        while all(state.idle for state in states(10)) and time.monotonic() < deadline:
            time.sleep(0.005)
        engine.pause_generation(mode)
        time.sleep(0.2)
        assert mode == "abort" or not results, (mode, results)
        engine.continue_generation()
        work.join(60)
        assert not work.is_alive() and results, mode
        ends = "abort" if mode == "abort" else "length"
        assert results[0].finish_reasons == (ends,), (mode, results[0].finish_reasons)
        assert (results[0].lengths.item() == 1500) == (ends == "length")


def launched_scene(folder: Path) -> None:
    """Test an engine that RolloutEngine starts, and a fresh engine with the new weights."""
    import torch

    torch.cuda.init()
    before = free()
    with launched(folder, seed=2) as engine:
        outputs(engine)
        new = outputs(engine)
    with launched(folder) as engine:
        outputs(engine)  # compiles kernels
        old = outputs(engine)
        assert old != new
        check_sleep(engine, old)
        check_updates(engine, old, new)
        check_mapped(engine, old, new)
        check_pauses(engine)
        assert outputs(engine) == old
    gc.collect()
    torch.cuda.empty_cache()  # of the trainer's weights
    deadline = time.monotonic() + 10
    while free() < before - LEFT and time.monotonic() < deadline:
        time.sleep(0.1)
    assert free() >= before - LEFT, (free(), before)


def quantized_scene(folder: Path) -> None:
    """Test FP8 weights that vLLM quantizes during loading."""
    with launched(folder, seed=2, quantization="fp8") as engine:
        outputs(engine)
        new = outputs(engine)
    with launched(folder, quantization="fp8", sleep_level=2) as engine:
        outputs(engine)
        old = outputs(engine)
        engine.sleep(wait_idle=True)
        with engine.staged_wake():
            report = engine.update_weights(weights(2), bucket_bytes=BUCKET, verify="full")
        print(f"--- update: {report}", flush=True)
        assert report.received == report.tensors and "converts" in report.unverified, report
        assert outputs(engine) == new != old
        engine.update_weights(weights(1), bucket_bytes=BUCKET, verify="full", flush_cache=True)
        assert outputs(engine) == old


def group_scene(folder: Path) -> None:
    """Send weights through a process group, as for an engine on other GPUs."""
    from memsaver.integrations.rollout.weights import WeightGroup

    with launched(folder) as engine:
        outputs(engine)
        old = outputs(engine)
        with WeightGroup(engine, backend="gloo") as group:
            state = {name: tensor.cpu() for name, tensor in weights(2).items()}
            report = engine.update_weights(state, group=group, bucket_bytes=BUCKET, verify="full")
            assert report.received == report.held == report.tensors, report
        assert outputs(engine) != old


@contextmanager
def connected(target: Any, **others: Any) -> Iterator[Any]:
    """Connect to an engine, check its sleep and updates, and yield the rollout engine."""
    from memsaver.integrations.rollout import RolloutEngine

    with RolloutEngine.connect(target, timeout=60, **others) as engine:
        outputs(engine)
        old = outputs(engine)
        check_sleep(engine, old)
        report = engine.update_weights(
            weights(2), bucket_bytes=BUCKET, verify="full", flush_cache=True
        )
        assert report.received == report.held == report.tensors, report
        assert outputs(engine) != old
        engine.sleep(wait_idle=True)
        with engine.staged_wake():
            engine.update_weights(weights(1), bucket_bytes=BUCKET, verify="full")
        assert outputs(engine) == old
        check_unsaved(engine, old)
        yield engine


def llm_scene(folder: Path, **others: Any) -> None:
    """Test a `vllm.LLM` in this process."""
    from vllm import LLM

    llm = LLM(**arguments(folder, logprobs_mode="processed_logprobs", **others))
    with connected(llm):
        pass
    llm.llm_engine.engine_core.shutdown()


def adapters_scene(folder: Path) -> None:
    """Test a `vllm.LLM` whose layers are wrapped for LoRA adapters."""
    llm_scene(folder, enable_lora=True, max_lora_rank=8, max_loras=1)


def async_scene(folder: Path) -> None:
    """Test an `AsyncLLM` in this process."""
    import vllm_connections

    with vllm_connections.async_llm(arguments(folder, logprobs_mode="processed_logprobs")) as llm:
        with connected(llm):
            pass
        assert not llm.errored  # `close` does not shut the engine down


def url_scene(folder: Path) -> None:
    """Test a server at a URL; its /health endpoint reports that the engine sleeps."""
    import httpx
    import vllm_connections

    given = arguments(folder, logprobs_mode="processed_logprobs")
    with vllm_connections.server(given) as url, connected(url, kind="vllm") as engine:
        engine.sleep(wait_idle=True)
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 503
        engine.wake_up()
        assert httpx.get(f"{url}/health", trust_env=False).status_code == 200


def two_scene(folder: Path) -> None:
    """Test a TP=2 engine that two trainer ranks share, each with its own GPU."""
    import qwen_model
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from memsaver.integrations.rollout import RolloutEngine

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    mesh = init_device_mesh("cuda", (1, 2), mesh_dim_names=("dp", "tp"))
    if rank == 0:
        qwen_model.save(folder / "model-1", qwen_model.weights(seed=1))
    dist.barrier()
    with RolloutEngine.launch(mesh, kind="vllm", timeout=200, **arguments(folder)) as engine:

        def generated() -> list[list[int]]:
            return engine.generate([PROMPTS[rank]], greedy()).token_ids.tolist()

        generated()  # compiles kernels
        old, awake = generated(), free()
        assert engine.tp_size == 2
        with engine.asleep(wait_idle=True):
            assert free() - awake > GIB
        assert generated() == old
        engine.sleep(wait_idle=True)
        with engine.staged_wake():
            report = engine.update_weights(weights(2), bucket_bytes=BUCKET, verify="full")
        assert report.received == report.held == report.tensors, report
        assert generated() != old
        engine.update_weights(weights(1), bucket_bytes=BUCKET, verify="full", flush_cache=True)
        assert generated() == old
        state = weights(2)
        if rank == 1:
            state = {name: tensor + 1 for name, tensor in state.items()}
        check_mismatch(engine, state)
        assert generated() == old
        check_damaged(engine, weights(2), ranks=2)
        assert generated() == old
    dist.destroy_process_group()


SCENES = {
    "two": two_scene,
    "launched": launched_scene,
    "quantized": quantized_scene,
    "adapters": adapters_scene,
    "group": group_scene,
    "llm": llm_scene,
    "async": async_scene,
    "url": url_scene,
}


def main() -> None:
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    SCENES[sys.argv[1]](Path(sys.argv[2]))
    print("held", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    main()
