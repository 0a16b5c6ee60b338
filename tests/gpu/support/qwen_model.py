"""A small Qwen3 model with random weights that an engine can load.

The weights have magnitudes similar to those of trained weights, so the generated tokens depend on
every layer and on the KV cache. An engine's dummy weights have much smaller magnitudes, and the
tokens would not depend on the dummy weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS, HIDDEN, MLP, VOCABULARY = 4, 1024, 4096, 16384
HEADS, HEAD = 8, 128
CONTEXT = 8192

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
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


def shapes() -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the model's tensors in parts, keyed by checkpoint name.

    Each layer is a part, and no part is larger than 40 MB.
    """
    inner = HEADS * HEAD
    parts: list[dict[str, tuple[int, ...]]] = []
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        parts.append(
            {
                f"{layer}.input_layernorm.weight": (HIDDEN,),
                f"{layer}.self_attn.q_proj.weight": (inner, HIDDEN),
                f"{layer}.self_attn.k_proj.weight": (inner, HIDDEN),
                f"{layer}.self_attn.v_proj.weight": (inner, HIDDEN),
                f"{layer}.self_attn.o_proj.weight": (HIDDEN, inner),
                f"{layer}.self_attn.q_norm.weight": (HEAD,),
                f"{layer}.self_attn.k_norm.weight": (HEAD,),
                f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
                f"{layer}.mlp.gate_proj.weight": (MLP, HIDDEN),
                f"{layer}.mlp.up_proj.weight": (MLP, HIDDEN),
                f"{layer}.mlp.down_proj.weight": (HIDDEN, MLP),
            }
        )
    parts.append({"model.embed_tokens.weight": (VOCABULARY, HIDDEN)})
    parts.append({"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)})
    return parts


def weights(seed: int) -> list[dict[str, Any]]:
    """Return tensors on the CPU, divided into the same parts as in `shapes`. The tensors depend
    only on the seed.
    """
    import torch

    random = torch.Generator().manual_seed(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=random)
        if len(shape) == 1:
            values = 1 + values / 10
        elif "embed" not in name:
            values /= shape[1] ** 0.5
        return values.to(torch.bfloat16)

    return [{name: tensor(name, shape) for name, shape in part.items()} for part in shapes()]


def save(folder: Path, parts: list[dict[str, Any]]) -> None:
    """Save the model with these weights as a checkpoint in `folder`."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    every = {name: tensor for part in parts for name, tensor in part.items()}
    save_file(every, str(folder / "model.safetensors"), metadata={"format": "pt"})
