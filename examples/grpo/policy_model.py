"""The policy: a Qwen3 model from `transformers`, with random weights or from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from vocabulary import Vocabulary

# hidden size, MLP size, layers, heads, KV heads, head size
SHAPES = {
    "tiny": (64, 128, 2, 2, 2, 32),
    "small": (512, 1536, 8, 8, 4, 64),
    "0.6b": (1024, 3072, 28, 16, 8, 128),
}


def config_of(model: str, vocabulary: Vocabulary) -> Any:
    """Return the configuration of a model with random weights, or of a checkpoint."""
    from transformers import AutoConfig, Qwen3Config

    if model not in SHAPES:
        return AutoConfig.from_pretrained(model)
    hidden, mlp, layers, heads, kv_heads, head = SHAPES[model]
    return Qwen3Config(
        vocab_size=vocabulary.size,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        pad_token_id=vocabulary.pad,
        bos_token_id=vocabulary.start,
        eos_token_id=vocabulary.end,
    )


def make_model(model: str, vocabulary: Vocabulary, seed: int, device: torch.device) -> Any:
    """Return the model in float32, with the same weights on every rank.

    Uses eager attention, because the backward pass of torch's fused kernels is not deterministic.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": "eager", "dtype": torch.float32}
    torch.manual_seed(seed)
    if model in SHAPES:
        made = AutoModelForCausalLM.from_config(config_of(model, vocabulary), **options)
    else:
        made = AutoModelForCausalLM.from_pretrained(model, **options)
    return made.to(device)


def shard(model: Any, mesh: Any) -> Any:
    """Return the model sharded by FSDP2 over a mesh's ranks: each layer, and then the rest."""
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def write_config(model: str, vocabulary: Vocabulary, folder: Path) -> Path:
    """Return a folder from which an engine can start before it receives weights."""
    if model not in SHAPES:
        return Path(model)
    values = config_of(model, vocabulary).to_dict()
    values |= {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder
