"""Whether the ranks of an update send the same, and which tensors need not be sent."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence

from memsaver.errors import ConfigError
from memsaver.integrations.rollout.weights.sources import Spec

__all__ = ["check_same", "common_tie", "names_digest"]


def check_same(ranks: Sequence[int], everyones: Sequence[Sequence[Spec]], whole: bool) -> None:
    """Raise `ConfigError`, on all ranks alike, if two ranks send different tensors.

    Args:
        ranks: the ranks.
        everyones: what each of them sends.
        whole: whether tensors are whole on every rank, so that their shapes must be the same.
    """
    for rank, theirs in zip(ranks, everyones, strict=True):
        for a, b in itertools.zip_longest(everyones[0], theirs):
            one, other = _in_words(a, whole), _in_words(b, whole)
            if one != other:
                raise ConfigError(
                    f"the ranks do not send the same: rank {ranks[0]} {one}, and rank {rank} "
                    f"{other}"
                )


def common_tie(told: Iterable[str | None]) -> str | None:
    """Return the earlier tensor that a tensor is the same memory as on all ranks.

    Args:
        told: what the ranks say of the tensor, as `Spec.same` does.

    Returns:
        The name; "" if a rank has it apart from others, or another one is the same there, so that
        it must be sent; None if no rank has an element of it.
    """
    names = {one for one in told if one is not None}
    if not names:
        return None
    return names.pop() if len(names) == 1 else ""


def names_digest(specs: Sequence[Spec]) -> str:
    """Return a digest of the tensors' names, types and shapes, for comparison with other ranks."""
    named = "\n".join(f"{spec.name} {spec.dtype} {spec.shape}" for spec in specs)
    return hashlib.blake2b(named.encode("utf-8", "replace"), digest_size=16).hexdigest()


def _in_words(spec: Spec | None, whole: bool) -> str:
    """Return what two ranks must have in common."""
    if spec is None:
        return "has no more"
    return f"has {spec.name} ({spec.dtype}{', ' + str(spec.shape) if whole else ''})"
