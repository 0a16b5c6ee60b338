"""Strategies for the arguments of operations."""

from __future__ import annotations

from hypothesis import strategies as st

from model.apparatus import THREADS
from model.expected import PAGE
from model.place import DEVICES, MIB, NAMES

LARGE = 66 * MIB  # larger than a copy chunk of a backup and a slab; rare, because it costs most
SMALL = [1, 512, 4096, 10_000, 70_000, 300_000]  # accessed bytes dominate the cost
SIZES = [
    *(MIB - 512, MIB, MIB + 512, PAGE - 512, PAGE, PAGE + 1, 3 * MIB + 4096, 5 * MIB),
]

names = st.sampled_from(NAMES)
devices = st.integers(0, DEVICES - 1)
threads = st.sampled_from([0, 0, *range(THREADS)])
sizes = st.sampled_from(32 * SMALL + 12 * SIZES + [LARGE])
picks = st.integers(0, 63)  # the index of an existing object, modulo their number
seeds = st.integers(0, 1 << 20)
backups = st.sampled_from([None, "none", "host", "pageable", "disk", "peer"])
overrides = st.sampled_from([None, None, None, "none", "host", "pageable", "disk", "peer"])
_TOGETHER = [("a", "b"), ("c", "d"), ("e", "b", "a"), ("d", "c", "a", "e"), ()]
some = st.sampled_from([*((name,) for name in NAMES), *_TOGETHER])
sides = st.sampled_from(
    [(("a",), ("b",)), (("b",), ("a",)), (("a", "c"), ("d",)), (("d",), ("c", "a")),
     (("e", "b"), ("d", "c")), (("c",), ("e", "a")), (("d", "e"), ("a", "b", "c"))]
)  # fmt: skip
