"""Strategies for the arguments of operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import strategies as st

from model.apparatus import THREADS
from model.expected import PAGE
from model.place import DEVICES, MIB, NAMES

LARGE = 66 * MIB  # larger than a copy chunk of a backup and a slab; rare, because it costs most
SMALL = [1, 512, 4096, 10_000, 70_000, 300_000]  # accessed bytes dominate the cost
SIZES = [
    *(MIB - 512, MIB, MIB + 512, PAGE - 512, PAGE, PAGE + 1, 3 * MIB + 4096, 5 * MIB),
]

Choices = Sequence[Sequence[Any]]  # of which a tuple has one element each


def _numbers(choices: Choices) -> st.SearchStrategy[int]:
    """Return a strategy for the index of a tuple.

    Each tuple requires only one draw, because a draw in Hypothesis takes longer than most calls to
    the library.
    """
    count = math.prod(map(len, choices))
    assert count <= 1 << 24, "Hypothesis would prefer small numbers"
    return st.integers(0, count - 1)


def _numbered(choices: Choices, number: int) -> tuple[Any, ...]:
    found = []
    for among in choices:
        number, at = divmod(number, len(among))
        found.append(among[at])
    return tuple(found)


def one_of_each(*choices: Sequence[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """Return a strategy for tuples that contain one element of each sequence."""
    return _numbers(choices).map(partial(_numbered, choices))


def lists(min_size: int, max_size: int, *parts: Choices) -> st.SearchStrategy[list[Any]]:
    """Return a strategy for lists whose elements contain a tuple from `one_of_each` for each part.

    The strategy always draws `max_size` elements, because `st.lists` makes an additional draw per
    element to determine the end of the list.
    """

    def chosen(drawn: tuple[int, ...]) -> list[Any]:
        size, *numbers = drawn
        starts = range(0, size * len(parts), len(parts))
        return [tuple(map(_numbered, parts, numbers[at : at + len(parts)])) for at in starts]

    elements = max_size * [_numbers(part) for part in parts]
    return st.tuples(st.integers(min_size, max_size), *elements).map(chosen)


THREAD = [0, 0, *range(THREADS)]
PICK = range(64)  # the index of an existing object, modulo their number
SEED = range(1 << 20)
OVERRIDE = [None, None, None, "none", "host", "pageable", "disk", "peer"]
_TOGETHER = [("a", "b"), ("c", "d"), ("e", "b", "a"), ("d", "c", "a", "e"), ()]
SOME = [*((name,) for name in NAMES), *_TOGETHER]
SIDES = [
    (("a",), ("b",)), (("b",), ("a",)), (("a", "c"), ("d",)), (("d",), ("c", "a")),
    (("e", "b"), ("d", "c")), (("c",), ("e", "a")), (("d", "e"), ("a", "b", "c"))
]  # fmt: skip

names = st.sampled_from(NAMES)
devices = st.integers(0, DEVICES - 1)
threads = st.sampled_from(THREAD)
sizes = st.sampled_from(32 * SMALL + 12 * SIZES + [LARGE])
picks = st.sampled_from(PICK)
seeds = st.sampled_from(SEED)
backups = st.sampled_from([None, "none", "host", "pageable", "disk", "peer"])
overrides = st.sampled_from(OVERRIDE)
some = st.sampled_from(SOME)
sides = st.sampled_from(SIDES)
