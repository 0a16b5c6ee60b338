"""`Part`: a rank's part of a tensor that is divided among a trainer's ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memsaver.errors import ConfigError

__all__ = ["Box", "Part", "check_cover", "copy_box"]

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """A rank's part of a whole tensor; the part is a box of the tensor's elements. See `update`.

    Attributes:
        tensor: the part's elements; the tensor can have any strides. If its shape differs from
            `size`, the box must contain whole rows, and the tensor must contain the same elements
            in the same order.
        shape: the shape of the whole tensor.
        begin: the index of the box's first element in each dimension; 0 for missing dimensions.
        size: the extents of the box; None means the tensor's shape.
    """

    tensor: Any
    shape: tuple[int, ...]
    begin: tuple[int, ...] = ()
    size: tuple[int, ...] | None = None

    @property
    def box(self) -> Box:
        """The box, as the first index and the end index in each dimension."""
        size = tuple(self.tensor.shape) if self.size is None else self.size
        begin = (*self.begin, *[0] * (len(size) - len(self.begin)))
        return tuple((at, at + extent) for at, extent in zip(begin, size, strict=True))

    def check(self, name: str) -> None:
        """Raise `ConfigError` if the part is not a box of the whole tensor."""
        try:
            box = self.box
        except (TypeError, ValueError):
            box = ()
        inside = len(box) == len(self.shape) and all(
            0 <= at <= end <= extent for (at, end), extent in zip(box, self.shape, strict=True)
        )
        if not inside or _elements(box) != self.tensor.numel():
            raise ConfigError(
                f"{name}: a part of shape {tuple(self.tensor.shape)} that begins at {self.begin} "
                f"with size {self.size} is not a box of a tensor of shape {tuple(self.shape)}"
            )
        rows = all(edge == (0, n) for edge, n in zip(box[1:], self.shape[1:], strict=True))
        if self.size is not None and tuple(self.tensor.shape) != tuple(self.size) and not rows:
            raise ConfigError(
                f"{name}: a part of shape {tuple(self.tensor.shape)} cannot fill the box {box}, "
                "because the box does not contain whole rows"
            )

    def write(self, out: Any) -> None:
        """Copy the part to its place in the whole tensor `out`, which must be contiguous."""
        if self.tensor.numel():
            into = _in(out, self.box)
            into.view(self.tensor.shape).copy_(self.tensor, non_blocking=out.is_cuda)


def copy_box(box: Box, whole: Any, out: Any) -> None:
    """Copy a box of the whole tensor `whole` to the same place in `out`."""
    if _elements(box):
        _in(out, box).copy_(_in(whole, box), non_blocking=out.is_cuda)


def check_cover(name: str, shape: tuple[int, ...], boxes: Sequence[Box | None]) -> None:
    """Raise `ConfigError` unless the ranks' boxes cover a tensor without overlap.

    Args:
        name: the tensor's name.
        shape: the shape of the whole tensor.
        boxes: the box of each rank; None for a whole tensor. Several ranks can have the same box.
    """
    if all(box is None for box in boxes):
        return
    if any(box is None for box in boxes):
        raise ConfigError(f"{name} is a `Part` on only some ranks")
    known = {box for box in boxes if box is not None and _elements(box)}
    for one, other in itertools.combinations(known, 2):
        if all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, other, strict=True)):
            raise ConfigError(f"the ranks' parts of {name} overlap: {one} and {other}")
    covered, total = sum(map(_elements, known)), math.prod(shape)
    if covered != total:
        raise ConfigError(f"the ranks' parts of {name} have {covered} of its {total} elements")


def _in(whole: Any, box: Box) -> Any:
    return whole[tuple(slice(at, end) for at, end in box)]


def _elements(box: Box) -> int:
    return math.prod(end - at for at, end in box)
