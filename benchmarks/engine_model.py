"""Define the model of the measured engines, a Qwen3 with random weights, and its trainer."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD, KV_HEADS = 128, 8
DROP_SECONDS = 20  # limit for an engine to release tensors that it received


@dataclass(frozen=True)
class Shape:
    """The size of a model."""

    layers: int
    hidden: int
    inter: int
    vocab: int
    heads: int


BIG = Shape(layers=36, hidden=4096, inter=12288, vocab=151936, heads=32)  # Qwen3-8B
SMALL = Shape(layers=4, hidden=512, inter=1024, vocab=8192, heads=8)


def write_config(shape: Shape, directory: Path) -> None:
    """Write the model's config.json, which is sufficient for an engine with dummy weights."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inter,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": True,
    }
    (directory / "config.json").write_text(json.dumps(config))


def kv_bytes(shape: Shape) -> int:
    """Return the bytes per token of a KV cache in bfloat16."""
    return 2 * shape.layers * KV_HEADS * HEAD * 2


def checkpoint(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each weight, as in a checkpoint."""
    hidden, inter = shape.hidden, shape.inter
    queries, keys = shape.heads * HEAD, KV_HEADS * HEAD
    yield "model.embed_tokens.weight", (shape.vocab, hidden)
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.q_norm.weight", (HEAD,)
        yield f"{layer}.self_attn.k_norm.weight", (HEAD,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inter, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inter, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inter)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (shape.vocab, hidden)


def save_checkpoint(shape: Shape, directory: Path, seed: int) -> None:
    """Write a checkpoint whose random weights are large enough to influence the generated tokens.

    SGLang's dummy weights are so small that all prompts have similar outputs.
    """
    import torch
    from safetensors.torch import save_file

    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in checkpoint(shape):
        values = torch.randn(size, generator=random)
        if len(size) == 1:
            values = 1 + values / 10
        elif "embed" not in name:
            values /= size[1] ** 0.5
        weights[name] = values.to(torch.bfloat16)
    save_file(weights, str(directory / "model.safetensors"))


class Trainer:
    """A copy of the weights on the GPU that can be sent to engines.

    Args:
        total: the number of bytes to allocate, if larger than the weights.
        device: the torch device.
    """

    def __init__(self, shape: Shape, total: int = 0, device: str = "cuda") -> None:
        self._shape, self._total, self._device = shape, total, device
        self.weights: list[tuple[str, Any]] = []
        self._rest: Any = None
        self._others = 0  # bytes of this process that belong to other code

    def take(self, seed: int) -> None:
        """Allocate new random weights that are determined by the seed."""
        import torch

        if self._device == "cuda":
            self._others = torch.cuda.memory_allocated()
        torch.manual_seed(seed)
        for name, size in checkpoint(self._shape):
            tensor = torch.empty(size, dtype=torch.bfloat16, device=self._device)
            self.weights.append((name, tensor.normal_(1.0 if len(size) == 1 else 0.0, 0.02)))
        held = sum(tensor.nbytes for _, tensor in self.weights)
        more = max(0, self._total - held)
        self._rest = torch.empty(more, dtype=torch.uint8, device=self._device)
        if self._device == "cuda":
            torch.cuda.synchronize()

    def drop(self) -> None:
        """Release all memory to the driver. Raises RuntimeError if an engine still uses memory."""
        self.weights.clear()
        self._rest = None
        let_go(self._device, self._others)


def let_go(device: str, at_most: int) -> None:
    """Wait until engines have released the tensors that they received, and release torch's cache.

    Raises RuntimeError if, after DROP_SECONDS, tensors of this process still use more than
    `at_most` bytes.
    """
    import torch

    gc.collect()
    if device != "cuda":
        return
    end = time.monotonic() + DROP_SECONDS
    while True:  # torch keeps memory to which another process has a handle
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated() - at_most
        if left <= 0:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"the engine holds {left} bytes of the trainer's")
        time.sleep(0.02)
