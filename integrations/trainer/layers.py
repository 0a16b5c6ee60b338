"""The tensors that each module of a model reads in its own forward pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from .holdings import Holding, gradient_of_leaf, is_fsdp2, parts_of

__all__ = ["has_separate_layers", "read_by_forward"]


def has_separate_layers(model: Any) -> bool:
    """Return whether it is known, for each tensor of a model, which forward pass reads it.

    The result is False in three cases. First, the model has FSDP2 modules, which gather other
    modules' parameters. Second, the model has scripted modules, which accept no hooks. Third, the
    model itself cannot be called, and some of its tensors are outside all callable modules.
    """
    import torch

    for part in model.modules():
        if isinstance(part, torch.jit.ScriptModule) or is_fsdp2(part):
            return False
    return _is_callable(model) or next(_own(model), None) is None


def read_by_forward(module: Any) -> Iterator[Holding]:
    """Yield the tensors that a module's forward pass reads outside its submodules' forward passes.

    These tensors are the module's own parameters, with their gradients, and its own buffers. The
    corresponding tensors of submodules that cannot be called, such as a `ParameterList`, are
    included too. For compiled modules, and for modules whose class or `forward` is torch's own, the
    tensors of all submodules are included; a `MultiheadAttention`, for example, does not call its
    projection. The exception is `Sequential`, which only calls its submodules.
    """
    import torch

    kind = type(module)
    is_torchs = kind.__module__.startswith("torch.") or kind.forward.__module__.startswith("torch.")
    reads_all = getattr(module, "_compiled_call_impl", None) is not None or (
        is_torchs and kind.forward is not torch.nn.Sequential.forward
    )
    for tensor in _all(module) if reads_all else _own(module):
        yield from parts_of(tensor, "a tensor of the module")
        gradient = gradient_of_leaf(tensor)
        if gradient is not None:
            yield from parts_of(gradient, "a gradient")


def _all(module: Any) -> Iterator[Any]:
    return itertools.chain(module.parameters(), module.buffers())


def _own(module: Any) -> Iterator[Any]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    for child in module.children():
        if not _is_callable(child):
            yield from _own(child)


def _is_callable(module: Any) -> bool:
    import torch

    return type(module).forward is not torch.nn.Module.forward
