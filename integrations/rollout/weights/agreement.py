"""Checks whether all ranks of an update send the same tensors."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence

from memsaver.errors import ConfigError

from .sources import Spec

__all__ = ["check_same", "common_tie", "names_digest"]


def check_same(ranks: Sequence[int], everyones: Sequence[Sequence[Spec]], whole: bool) -> None:
    """Raise the same `ConfigError` on all ranks if two ranks send different tensors.

    Args:
        ranks: the ranks, in the order of `everyones`.
        everyones: for each rank, the tensors that it sends.
        whole: whether every rank has whole tensors, whose shapes must therefore be equal.
    """
    for rank, theirs in zip(ranks, everyones, strict=True):
        for a, b in itertools.zip_longest(everyones[0], theirs):
            one, other = _described(a, whole), _described(b, whole)
            if one != other:
                raise ConfigError(
                    f"the ranks send different tensors: rank {ranks[0]} {one}, and rank {rank} "
                    f"{other}"
                )


def common_tie(everyones: Iterable[str | None]) -> str | None:
    """Return the name of the earlier tensor with which a tensor shares its memory on all ranks.

    Args:
        everyones: the tensor's `Spec.same` on each rank.

    Returns:
        The name of the earlier tensor. "" if the tensor must be sent, because the ranks differ or
        the tensor shares no earlier tensor's memory on at least one rank. None if no rank has an
        element of the tensor.
    """
    names = {one for one in everyones if one is not None}
    if not names:
        return None
    return names.pop() if len(names) == 1 else ""


def names_digest(specs: Sequence[Spec]) -> str:
    """Return a digest of the tensors' names, types and shapes, for comparison with other ranks."""
    named = "\n".join(f"{spec.name} {spec.dtype} {spec.shape}" for spec in specs)
    return hashlib.blake2b(named.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _described(spec: Spec | None, whole: bool) -> str:
    """Describe the properties that must be the same on all ranks, for an error message."""
    if spec is None:
        return "has no further tensor"
    return f"has {spec.name} ({spec.dtype}{', ' + str(spec.shape) if whole else ''})"
