"""A trainer's weights and the engines' output, for tests of weight updates."""

from __future__ import annotations

from typing import Any

from rollout_child import PROMPTS, flushed, greedy, rows


def state(seed: int, **to: Any) -> dict[str, Any]:
    """Return a trainer's weights; by default, they are on the trainer's GPU."""
    import qwen_model

    to = to or {"device": "cuda"}
    return {n: t.to(**to) for part in qwen_model.weights(seed) for n, t in part.items()}


def in_the_engines_layout(seed: int) -> dict[str, Any]:
    """Return a one-rank engine's weights, by parameter name."""
    import torch

    whole = state(seed)
    fused: dict[str, list[Any]] = {}
    for name, tensor in whole.items():
        for part, into in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up")):
            name = name.replace(f".{part}_proj.", f".{into}_proj.")
        name = name.replace(".mlp.up_proj.", ".mlp.gate_up_proj.")
        fused.setdefault(name, []).append(tensor)
    return {name: torch.cat(parts) for name, parts in fused.items()}


def outputs(engine: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        flushed(engine)
        found += rows(engine.generate([prompt], greedy()))
    return found
