"""The layout of model weights in a trainer's and an engine's memory, computed without a GPU.

A layout is a list of allocations in the order in which they are made. An allocation is a list of
runs. A run is a sequence of consecutive bytes of a named checkpoint tensor. A rank's columns of a
tensor have their own name, because they are not consecutive bytes of the full tensor.

The engines are SGLang and vLLM with unquantized weights. In these engines, q, k and v are rows of
one tensor, gate and up are rows of another tensor, and the experts of a layer are stacked. Trainers
have bfloat16 weights without padding of the vocabulary, in one of the layouts of TRAINERS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

BYTES = 2  # of an element


@dataclass(frozen=True)
class Run:
    """The `nbytes` consecutive bytes of a tensor that start at `offset`."""

    tensor: str
    offset: int
    nbytes: int


Allocation = list[Run]


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder; `experts` is 0 if its MLPs are dense."""

    name: str
    layers: int
    hidden: int
    inter: int
    heads: int
    kv_heads: int
    head: int
    vocab: int = 151936
    experts: int = 0
    tied: bool = False
    norms: bool = True  # of q and k, instead of biases


MODELS = {
    model.name: model
    for model in (
        Model("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, tied=True),
        Model("Qwen3-8B", 36, 4096, 12288, 32, 8, 128),
        Model("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, vocab=152064, norms=False),
        Model("Qwen3-30B-A3B", 48, 2048, 768, 32, 4, 128, experts=128),
    )
}


def rows(tensor: str, count: int, width: int, rank: int = 0, ranks: int = 1) -> Run:
    """Return a rank's rows of a tensor, as divided by torch.chunk."""
    part = -(-count // ranks)
    first = min(count, rank * part)
    return Run(tensor, first * width * BYTES, (min(count, first + part) - first) * width * BYTES)


def columns(tensor: str, count: int, width: int, rank: int, ranks: int) -> Run:
    """Return a rank's part of the columns of a tensor."""
    name = tensor if ranks == 1 else f"{tensor}, columns {rank} of {ranks}"
    return Run(name, 0, count * width // ranks * BYTES)


def tensors(model: Model) -> Iterator[tuple[str, int, int]]:
    """Yield the name, rows and width of each of the checkpoint's tensors, in the modules' order."""
    hidden, q, kv = model.hidden, model.heads * model.head, model.kv_heads * model.head
    yield "embed", model.vocab, hidden
    for layer in range(model.layers):
        for name, count in (("q", q), ("k", kv), ("v", kv)):
            yield f"{layer}.{name}", count, hidden
            if not model.norms:
                yield f"{layer}.{name}.bias", count, 1
        yield f"{layer}.o", hidden, q
        if model.norms:
            yield f"{layer}.q_norm", model.head, 1
            yield f"{layer}.k_norm", model.head, 1
        if model.experts:
            yield f"{layer}.router", model.experts, hidden
        for prefix in experts(model, layer):
            yield f"{prefix}.gate", model.inter, hidden
            yield f"{prefix}.up", model.inter, hidden
            yield f"{prefix}.down", hidden, model.inter
        yield f"{layer}.input_norm", hidden, 1
        yield f"{layer}.post_norm", hidden, 1
    yield "norm", hidden, 1
    if not model.tied:
        yield "lm_head", model.vocab, hidden


def experts(model: Model, layer: int) -> list[str]:
    """Return the name prefixes of a layer's MLPs."""
    return [f"{layer}.{number}" for number in range(model.experts)] or [f"{layer}.mlp"]


def engine(model: Model, rank: int, ranks: int) -> list[Allocation]:
    """Return the layout of one rank of an engine with tensor parallelism."""
    shapes = {name: (count, width) for name, count, width in tensors(model)}

    def part(name: str) -> Run:
        return rows(name, *shapes[name], rank, ranks)

    def whole(name: str) -> Run:
        return rows(name, *shapes[name])

    found = [[part("embed")]]
    for layer in range(model.layers):
        found.append([part(f"{layer}.{name}") for name in "qkv"])
        if not model.norms:
            found.append([part(f"{layer}.{name}.bias") for name in "qkv"])
        found.append([columns(f"{layer}.o", *shapes[f"{layer}.o"], rank, ranks)])
        if model.norms:
            found += [[whole(f"{layer}.q_norm")], [whole(f"{layer}.k_norm")]]
        if model.experts:
            found.append([whole(f"{layer}.router")])
        prefixes = experts(model, layer)
        found.append([part(f"{prefix}.{name}") for prefix in prefixes for name in ("gate", "up")])
        downs = [f"{prefix}.down" for prefix in prefixes]
        found.append([columns(name, *shapes[name], rank, ranks) for name in downs])
        found += [[whole(f"{layer}.input_norm")], [whole(f"{layer}.post_norm")]]
    found.append([whole("norm")])
    return found if model.tied else [*found, [part("lm_head")]]


# --- trainers ------------------------------------------------------------------------------------


def whole(model: Model, rank: int, ranks: int) -> list[Allocation]:
    """Return the layout of a trainer with a complete copy of the weights on each GPU."""
    return [[rows(name, count, width)] for name, count, width in tensors(model)]


def fsdp2(model: Model, rank: int, ranks: int) -> list[Allocation]:
    """Return the layout of a rank's shards between two steps; a shard is some rows of a tensor."""
    return [[rows(name, count, width, rank, ranks)] for name, count, width in tensors(model)]


def megatron(model: Model, rank: int, ranks: int) -> list[Allocation]:
    """Return the layout of a Megatron Core rank, in which q, k and v alternate by query group."""
    found = []
    head, hidden, groups = model.head, model.hidden, model.kv_heads // ranks
    per_group = model.heads // model.kv_heads
    for allocation in engine(model, rank, ranks):
        if allocation[0].tensor.endswith(".q"):
            q, k, v = allocation
            one = head * hidden * BYTES
            allocation = [
                Run(run.tensor, run.offset + group * heads * one, heads * one)
                for group in range(groups)
                for run, heads in ((q, per_group), (k, 1), (v, 1))
            ]
        found.append(allocation)
    return found


def megatron_buffer(model: Model, rank: int, ranks: int) -> list[Allocation]:
    """Return Megatron's layout in the distributed optimizer's single buffer, last tensors first."""
    found: Allocation = []
    for allocation in reversed(megatron(model, rank, ranks)):
        found += allocation
        rest = -sum(run.nbytes for run in allocation) % 128
        if rest:
            found.append(Run("", 0, rest))  # padding
    return [found]


TRAINERS = {
    "whole tensors": whole,
    "FSDP2": fsdp2,
    "Megatron": megatron,
    "Megatron, distributed optimizer": megatron_buffer,
}
