"""A checkpoint's weights, divided into the shards of a Megatron trainer's ranks."""

import torch

_LAYERS = "decoder.layers."


def shards_of(whole, rank, size, *, heads, groups, multiple=1, fused_norms=True):
    """Return a rank's tensors, keyed by Megatron's names.

    Args:
        whole: the tensors, by their Hugging Face names.
        rank: the tensor-parallel rank.
        size: the number of ranks.
        heads: the number of attention heads.
        groups: the number of key-value heads.
        multiple: the vocabulary is padded to a multiple of this number times `size`.
        fused_norms: whether each norm is part of the linear layer that follows.
    """
    shards = {}
    for name, tensor in whole.items():
        rows = tensor.chunk(size)[rank] if len(tensor) % size == 0 else None
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            called = "output_layer.weight"
            if name.startswith("model."):
                called = "embedding.word_embeddings.weight"
            unit = multiple * size
            padded = torch.full((-len(tensor) % unit, *tensor.shape[1:]), 7.0).to(tensor)
            shards[called] = torch.cat([tensor, padded]).chunk(size)[rank].clone()
        elif name == "model.norm.weight":
            shards["decoder.final_layernorm.weight"] = tensor
        else:
            layer, inner = name.removeprefix("model.layers.").split(".", 1)
            prefix = f"{_LAYERS}{layer}."
            _add_layer(shards, prefix, inner, tensor, rows, rank, size, fused_norms)
    for name in [name for name in shards if name.endswith(".qkv")]:
        kind = shards.pop(name)
        q = kind["q"].view(groups // size, heads // groups, -1, *kind["q"].shape[1:])
        k, v = (kind[x].view(groups // size, 1, *q.shape[2:]) for x in "kv")
        shards[name.removesuffix(".qkv")] = torch.cat([q, k, v], 1).reshape(-1, *q.shape[3:])
    for name in [name for name in shards if name.endswith(".gate_up")]:
        kind = shards.pop(name)
        shards[name.removesuffix(".gate_up")] = torch.cat([kind["gate"], kind["up"]])
    return shards


def _add_layer(shards, prefix, inner, tensor, rows, rank, size, fused_norms):
    part, _, kind = inner.removeprefix("self_attn.").removeprefix("mlp.").partition("_proj.")
    if part in ("q", "k", "v"):
        name = f"{prefix}self_attention.linear_qkv.{kind}.qkv"
        shards.setdefault(name, {})[part] = rows
    elif part in ("gate", "up"):
        shards.setdefault(f"{prefix}mlp.linear_fc1.weight.gate_up", {})[part] = rows
    elif part in ("o", "down"):
        name = "self_attention.linear_proj" if part == "o" else "mlp.linear_fc2"
        shards[f"{prefix}{name}.weight"] = tensor.chunk(size, 1)[rank].contiguous()
    else:
        names = {
            "input_layernorm.weight": ("linear_qkv.layer_norm_weight", "input_layernorm.weight"),
            "post_attention_layernorm.weight": (
                "linear_fc1.layer_norm_weight",
                "pre_mlp_layernorm.weight",
            ),
            "self_attn.q_norm.weight": ("self_attention.q_layernorm.weight",) * 2,
            "self_attn.k_norm.weight": ("self_attention.k_layernorm.weight",) * 2,
        }
        fused, alone = names[inner]
        if fused_norms and fused.startswith("linear"):
            module = "self_attention" if "qkv" in fused else "mlp"
            fused = f"{module}.{fused}"
        shards[prefix + (fused if fused_norms else alone)] = tensor
