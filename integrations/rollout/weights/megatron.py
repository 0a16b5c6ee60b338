"""A Megatron rank's weights, as parts of the tensors in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from memsaver.errors import ConfigError

from .parts import Part

__all__ = ["megatron_parts"]

_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_VOCABULARY = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
}
_NORM = {"decoder.final_layernorm.weight": "model.norm.weight"}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def megatron_parts(
    state: Any,
    *,
    tp_rank: int,
    tp_size: int,
    heads: int,
    query_groups: int,
    vocabulary: int,
) -> Iterator[tuple[str, Any]]:
    """Yield a rank's weights for `update`, under their names in a checkpoint. Copies nothing.

    The model must be a dense decoder that uses Megatron Core's names. The yielded names are the
    Hugging Face names for Llama and Qwen. In `linear_qkv`, the query, key and value of each group
    must be adjacent. In `linear_fc1`, the gate and up projections of a rank must be adjacent. The
    vocabulary can be padded. With tied embeddings, the output layer is missing, or it shares the
    memory of the embeddings and is not sent.

    Args:
        state: a Megatron `GPTModel`, or a mapping from the model's names to this rank's tensors.
        tp_rank: this process's rank in the tensor-parallel group.
        tp_size: the number of ranks in that group.
        heads: the number of attention heads in the model.
        query_groups: the number of key-value heads in the model.
        vocabulary: the size of the model's vocabulary, without padding.

    Raises:
        ConfigError: a name is unknown, such as the name of an expert, or sizes are inconsistent.
    """
    counts = tp_size, heads, query_groups
    if min(counts) < 1 or heads % query_groups or query_groups % tp_size:
        raise ConfigError(
            f"{query_groups} query groups of {heads} heads cannot be divided among {tp_size} ranks"
        )
    named = state.items() if isinstance(state, Mapping) else state.state_dict().items()
    for name, tensor in named:
        if not hasattr(tensor, "dim") or name.endswith("_extra_state"):
            continue  # Transformer Engine's extra state may be a tensor
        name = name.removeprefix("module.")
        layer = _LAYER.fullmatch(name)
        if layer is None:
            yield _outside(name, tensor, tp_rank, tp_size, vocabulary)
            continue
        number, inner = layer.groups()
        prefix = f"model.layers.{number}."
        if inner in _WHOLE:
            yield prefix + _WHOLE[inner], tensor
        elif inner in _COLUMNS:
            yield prefix + _COLUMNS[inner], _columns(tensor, tp_rank, tp_size)
        elif inner.startswith("self_attention.linear_qkv."):
            kind = inner.rpartition(".")[2]
            for letter, part in _attention(name, tensor, tp_rank, tp_size, heads, query_groups):
                yield f"{prefix}self_attn.{letter}_proj.{kind}", part
        elif inner == "mlp.linear_fc1.weight":
            half = len(tensor) // 2
            yield f"{prefix}mlp.gate_proj.weight", _rows(tensor[:half], tp_rank, tp_size)
            yield f"{prefix}mlp.up_proj.weight", _rows(tensor[half:], tp_rank, tp_size)
        else:
            raise _unknown(name)


def _outside(
    name: str, tensor: Any, tp_rank: int, tp_size: int, vocabulary: int
) -> tuple[str, Any]:
    """Return the checkpoint's name for a tensor outside the layers, and this rank's part."""
    if name in _NORM:
        return _NORM[name], tensor
    if name not in _VOCABULARY:
        raise _unknown(name)
    padded = len(tensor) * tp_size
    if padded < vocabulary:
        raise ConfigError(f"{name} has {padded} rows on all ranks, fewer than {vocabulary}")
    begin = min(tp_rank * len(tensor), vocabulary)
    rows = min(len(tensor), vocabulary - begin)
    return _VOCABULARY[name], Part(tensor[:rows], (vocabulary, *tensor.shape[1:]), (begin,))


def _attention(
    name: str, tensor: Any, tp_rank: int, tp_size: int, heads: int, query_groups: int
) -> Iterator[tuple[str, Part]]:
    """Yield the parts of a fused projection, whose rows are ordered by query group."""
    groups, queries = query_groups // tp_size, heads // query_groups
    if len(tensor) % (groups * (queries + 2)):
        raise ConfigError(
            f"{name} has {len(tensor)} rows, which {groups} groups of {queries + 2} heads do not "
            "divide"
        )
    by_group = tensor.view(groups, queries + 2, -1, *tensor.shape[1:])
    for letter, part in (
        ("q", by_group[:, :queries]),
        ("k", by_group[:, queries]),
        ("v", by_group[:, queries + 1]),
    ):
        rows = part.numel() // max(1, tensor[:1].numel())
        size = (rows, *tensor.shape[1:])
        yield letter, Part(part, (rows * tp_size, *size[1:]), (tp_rank * rows,), size)


def _rows(tensor: Any, tp_rank: int, tp_size: int) -> Part:
    rows = len(tensor)
    return Part(tensor, (rows * tp_size, *tensor.shape[1:]), (tp_rank * rows,))


def _columns(tensor: Any, tp_rank: int, tp_size: int) -> Part:
    rows, columns = tensor.shape
    return Part(tensor, (rows, columns * tp_size), (0, tp_rank * columns))


def _unknown(name: str) -> ConfigError:
    return ConfigError(
        f"{name} is not a weight of a dense Megatron decoder: pass its `Part` by the name in the "
        "checkpoint instead"
    )
