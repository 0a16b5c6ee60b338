"""Replaces a model's `load_weights` method for the duration of a `with` statement."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from memsaver._runtime.native import _C

from .writes import Load

__all__ = ["replaced_loader"]


@contextlib.contextmanager
def replaced_loader(
    model: Any, run: Callable[[Iterable[tuple[str, Any]], Load], Any]
) -> Iterator[None]:
    """Replace `model.load_weights` during the block.

    The tensors of a load may be on a device that this process uses for the first time. Because that
    device writes into the model's memory, it receives access to all tags.

    Args:
        model: the model.
        run: a function that returns the result of a load. The function's first argument is an
            iterable of the (name, tensor) pairs to load. Its second argument is a function that
            loads tensors as the model does and may be called several times.
    """
    original = vars(model).get("load_weights")
    load = model.load_weights

    def replaced(weights: Iterable[tuple[str, Any]], *args: Any, **named: Any) -> Any:
        if isinstance(weights, Sequence):
            _C.refresh_peers()
        else:
            weights = _opened(weights)
        return run(weights, lambda tensors: load(tensors, *args, **named))

    model.load_weights = replaced
    try:
        yield
    finally:
        if original is None:
            del model.load_weights
        else:
            model.load_weights = original


def _opened(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    for named in weights:
        _C.refresh_peers()
        yield named
