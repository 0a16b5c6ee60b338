"""Runs one rank of a trainer with Megatron's shards; exits with status 0 on success.

usage: megatron_child.py SCENARIO FOLDER

The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.

The model has grouped queries, tied embeddings, and a vocabulary that Megatron pads.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import sys
from pathlib import Path
from typing import Any

from rollout_child import PROMPTS, RANK, SIZE, STUCK_SECONDS, flushed, greedy, rows
from weight_sync_child import refused

MIB = 1 << 20
BUCKET = 24 * MIB
VOCABULARY, MULTIPLE, GROUPS = 16301, 128, 4


def whole(seed: int) -> dict[str, Any]:
    """Return a checkpoint's tensors, on the CPU."""
    import qwen_model

    weights = {n: t for part in qwen_model.weights(seed) for n, t in part.items()}
    del weights["lm_head.weight"]
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:VOCABULARY] / 32
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weights[name][: GROUPS * qwen_model.HEAD]
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def save(folder: Path) -> None:
    """Save the checkpoint that the engine loads at its start."""
    import qwen_model
    from safetensors.torch import save_file

    folder.mkdir()
    config = {
        **qwen_model.CONFIG,
        "vocab_size": VOCABULARY,
        "num_key_value_heads": GROUPS,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(whole(1), str(folder / "model.safetensors"), metadata={"format": "pt"})


def shards(seed: int, device: Any = "cuda") -> dict[str, Any]:
    """Return this rank's tensors, keyed by Megatron's names."""
    import qwen_model
    from megatron_shards import shards_of

    sizes = {"heads": qwen_model.HEADS, "groups": GROUPS, "multiple": MULTIPLE}
    made = shards_of(whole(seed), RANK, SIZE, **sizes)
    return {name: tensor.contiguous().to(device) for name, tensor in made.items()}


def parts(own: dict[str, Any]) -> list[tuple[str, Any]]:
    import qwen_model

    from memsaver.integrations.rollout.weights import megatron_parts

    sizes = {"heads": qwen_model.HEADS, "query_groups": GROUPS, "vocabulary": VOCABULARY}
    return list(megatron_parts(own, tp_rank=RANK, tp_size=SIZE, **sizes))


def outputs(engine: Any) -> list[list[int]]:
    """Return, on all ranks, the greedy tokens for rank 0's prompts."""
    import torch.distributed as dist

    found = []
    for prompt in PROMPTS:
        flushed(engine)
        found += rows(engine.generate([prompt] if RANK == 0 else [], greedy()))
    shared = [found]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def check(engine: Any) -> None:
    """Compare updates from shards with updates from whole tensors.

    Also check the memory use, and that updates leave the shards unchanged.
    """
    import torch
    import torch.distributed as dist

    import memsaver
    from memsaver.errors import ConfigError
    from memsaver.integrations.rollout.weights import Part

    first = outputs(engine)
    engine.update_weights({n: t.cuda() for n, t in whole(2).items()}, verify="full")
    second = outputs(engine)
    assert all(new != old for new, old in zip(second, first, strict=True))
    for seed, expected in ((1, first), (2, second)):
        own = shards(seed)
        kept = {name: tensor.clone() for name, tensor in own.items()}
        dist.barrier()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.sleep(wait_idle=True)
        with engine.staged_wake():
            report = engine.update_weights(parts(own), verify="full", bucket_bytes=BUCKET)
        assert report.held == report.tensors == report.received, report
        assert report.unverified == "", report
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= report.bucket_bytes + MIB, (peak, report)
        print(f"{report.bytes / MIB:.0f} MiB in {report.seconds:.3f} s, {peak} more", flush=True)
        assert torch.cuda.memory_allocated() == before
        assert outputs(engine) == expected, seed
        assert all(torch.equal(own[name], kept[name]) for name in own)
    # Tied embeddings with an output layer of their own name; shards in a tag, and on the CPU.
    with memsaver.region("trainer", backup="host"):
        own = {name: tensor.clone() for name, tensor in shards(1).items()}
    own["output_layer.weight"] = own["embedding.word_embeddings.weight"]
    report = engine.update_weights(parts(own), verify="full")
    assert report.tied == ("lm_head.weight",), report
    assert outputs(engine) == first
    engine.update_weights(parts(shards(2, "cpu")), verify="full")
    assert outputs(engine) == second
    if RANK == 0:
        name = "decoder.layers.0.mlp.linear_fc2.weight"
        own[name] = own[name][:, ::2].contiguous()
    error = refused(ConfigError, engine.update_weights, parts(own))
    assert "different tensors" in str(error) or "elements" in str(error), error
    bad = dict(parts(shards(1)))
    name = "model.layers.1.self_attn.k_proj.weight"
    if RANK == 1:
        bad[name] = Part(bad[name].tensor[:1], bad[name].shape, bad[name].begin)
    error = refused(ConfigError, engine.update_weights, bad)
    assert name in str(error), error
    assert outputs(engine) == second


def one_gpu(folder: Path) -> None:
    """Send weights from two ranks on one GPU to a one-rank engine; the ranks use gloo."""
    run(folder, 0, "gloo", {"tp_size": 1})


def two_gpus(folder: Path) -> None:
    """Send weights from two ranks on two GPUs to a two-rank engine, then to a one-rank engine."""
    run(folder, RANK, "nccl", {}, {"tp_size": 1})


def run(folder: Path, device: int, backend: str, *engines: dict[str, Any]) -> None:
    import sglang_engines
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from memsaver.integrations.rollout import RolloutEngine

    torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=240))
    kind = "cpu" if backend == "gloo" else "cuda"
    mesh = init_device_mesh(kind, (1, SIZE), mesh_dim_names=("dp", "tp"))
    if RANK == 0:
        save(folder / "model")
    dist.barrier()
    named = {**sglang_engines.COMMON, **sglang_engines.KEPT, "max_total_tokens": 16384}
    named["model_path"] = str(folder / "model")
    for options in engines:
        with RolloutEngine.launch(mesh, **named, **options, timeout=240) as engine:
            assert engine.tp_size == options.get("tp_size", SIZE)
            check(engine)
    dist.destroy_process_group()


SCENES = {"one_gpu": one_gpu, "two_gpus": two_gpus}


if __name__ == "__main__":
    from sglang_child import check_installation

    sys.path.append(str(Path(__file__).parents[2] / "support"))
    check_installation()
    faulthandler.dump_traceback_later(STUCK_SECONDS)
    SCENES[sys.argv[1]](Path(sys.argv[2]))
    print("held", flush=True)
