"""The addresses of tensors and buffers."""

from __future__ import annotations

from typing import Any

from memsaver._runtime.native import _C
from memsaver.errors import ConfigError

__all__ = ["ranges_of"]


def ranges_of(memory: Any) -> list[tuple[int, int]]:
    """Return the address and the size in bytes of each part of `memory`.

    Args:
        memory: a dense tensor, an object with an `address` and `nbytes`, a pair (address, bytes),
            or a list of these.

    Raises:
        ConfigError: `memory` is something else.
    """
    if isinstance(memory, list):
        return [found for part in memory for found in ranges_of(part)]
    if isinstance(memory, tuple) and len(memory) == 2 and all(map(_is_size, memory)):
        return [memory]
    if hasattr(memory, "data_ptr") and hasattr(memory, "stride"):
        return [_range_of_tensor(memory)]
    address: Any = getattr(memory, "address", None)
    nbytes: Any = getattr(memory, "nbytes", None)
    if _is_size(address) and _is_size(nbytes):
        return [(address, nbytes)]
    raise ConfigError(
        f"a {type(memory).__name__} has no address: pass a dense tensor, an object with `address` "
        "and `nbytes`, a pair (address, bytes), or a list of those"
    )


def _range_of_tensor(tensor: Any) -> tuple[int, int]:
    """Return the memory range from a tensor's first element to its last."""
    with _C.SignalsDeferred():  # so that a handler's exception is not taken for torch's
        try:
            address, shape = int(tensor.data_ptr()), tensor.shape
            last = sum((n - 1) * step for n, step in zip(shape, tensor.stride(), strict=True))
        except Exception as error:  # of several types, for tensors without their own memory
            raise ConfigError(f"a {type(tensor).__name__} has no address: {error}") from error
    return address, (last + 1) * int(tensor.element_size()) if 0 not in shape else 0


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64
