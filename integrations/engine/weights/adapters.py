"""Removes LoRA's wrappers from a model while the model's weight loader runs.

An engine with LoRA wraps each layer that an adapter can change. The wrapper's attribute
`base_layer` is the original layer, so the parameters' names contain ".base_layer". As a result,
many models' loaders reject a checkpoint's names or do not find the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["Renamed", "without_adapters"]

_WRAPPER = "BaseLayerWithLoRA"  # the base class of the wrappers, in vLLM and in SGLang
_INFIX = ".base_layer."
# An attribute of vLLM's experts. If it is set, the experts' names contain ".base_layer".
_PREFIX = "lora_base_layer_prefix"

Tensors = Iterable[tuple[str, Any]]
Renamed = Callable[[Tensors], Tensors]


@contextlib.contextmanager
def without_adapters(model: Any) -> Iterator[Renamed]:
    """During the block, replace the wrappers in a model with the layers that they wrap.

    The model must not run in the block. The layers, their memory and the adapters do not change.
    Blocks may be nested.

    Yields:
        A function that renames named tensors to the names that the model's loader expects during
        the block. The function removes ".base_layer", which some trainers add to the names of a
        model with LoRA.
    """
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        if not _is_wrapper(parent)
        for name, child in parent._modules.items()
        if _is_wrapper(child)
    ]
    experts = [layer for layer in model.modules() if vars(layer).get(_PREFIX)]
    prefixes = [getattr(layer, _PREFIX) for layer in experts]
    try:
        for parent, name, child in wrapped:
            parent._modules[name] = child.base_layer
        for layer in experts:
            setattr(layer, _PREFIX, "")
        yield _renamed if wrapped else lambda tensors: tensors
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
        for layer, prefix in zip(experts, prefixes, strict=True):
            setattr(layer, _PREFIX, prefix)


def _is_wrapper(module: Any) -> bool:
    return any(one.__name__ == _WRAPPER for one in type(module).__mro__)


def _renamed(tensors: Tensors) -> Tensors:
    return ((name.replace(_INFIX, "."), tensor) for name, tensor in tensors)
