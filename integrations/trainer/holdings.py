"""What optimizers and modules hold: their tensors, down to the storages behind them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Holding", "gradients_of", "holdings_of", "reshard", "storages_of"]


@dataclass(frozen=True)
class Holding:
    """A tensor of somebody's.

    Attributes:
        tensor: dense, with a storage of its own or a shared one; no wrapper around others.
        what: what it is, for messages: "state 'exp_avg'".
        is_counter: whether it is an optimizer's count of steps, which lies on the host by default.
    """

    tensor: Any
    what: str
    is_counter: bool = False


def holdings_of(target: Any, parameters: bool) -> Iterator[Holding]:
    """What a target holds now, without gradients.

    Args:
        target: an optimizer (its states), a module (its parameters and buffers), or a tensor.
        parameters: whether an optimizer's parameters count too.
    """
    import torch

    if isinstance(target, torch.optim.Optimizer):
        for state in list(target.state.values()):
            yield from _of_state(state, "state")
        if parameters:
            for parameter in _parameters_of(target):
                yield from _parts(parameter, "a parameter of the optimizer")
    elif isinstance(target, torch.nn.Module):
        for name, parameter in target.named_parameters():
            yield from _parts(parameter, f"parameter {name!r}")
        for name, buffer in target.named_buffers():
            yield from _parts(buffer, f"buffer {name!r}")
    else:
        yield from _parts(target, "a tensor")


def gradients_of(target: Any) -> Iterator[Holding]:
    """The gradients that a target's parameters have now."""
    for parameter in _parameters_of(target):
        if parameter.grad is not None:
            yield from _parts(parameter.grad, "a gradient")


def storages_of(holdings: Iterable[Holding]) -> dict[int, tuple[Any, Holding]]:
    """Each storage with bytes once, and the first holding of it; by an id of the storage."""
    found: dict[int, tuple[Any, Holding]] = {}
    for holding in holdings:
        storage = holding.tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr():
            found.setdefault(storage._cdata, (storage, holding))
    return found


def reshard(target: Any) -> None:
    """Let a module's FSDP2 parts hold their shards alone, as before each forward."""
    import torch

    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is not None and isinstance(target, torch.nn.Module):
        for module in target.modules():
            if isinstance(module, kind):
                module.reshard()


def _parameters_of(target: Any) -> Iterator[Any]:
    import torch

    if isinstance(target, torch.optim.Optimizer):
        for group in target.param_groups:
            yield from group["params"]
    elif isinstance(target, torch.nn.Module):
        yield from target.parameters()
    elif target.is_leaf:
        yield target


def _of_state(value: Any, what: str) -> Iterator[Holding]:
    """The tensors in a state, however deep its dicts and lists are."""
    import torch

    if isinstance(value, torch.Tensor):
        yield from _parts(value, what, what == "state 'step'")
    elif isinstance(value, Mapping):
        for key, inner in list(value.items()):
            yield from _of_state(inner, f"state {key!r}")
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _of_state(inner, what)


def _parts(tensor: Any, what: str, is_counter: bool = False) -> Iterator[Holding]:
    """The dense tensors that a tensor is made of: DTensors and other wrappers hold some."""
    import torch
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, name)
            if isinstance(inner, torch.Tensor):  # not a DTensor's mesh
                yield from _parts(inner, what, is_counter)
    elif torch.nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided:
        return  # without memory yet; or sparse: not moved
    elif tensor.device.type != "meta":
        yield Holding(tensor, what, is_counter)
