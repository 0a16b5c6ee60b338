"""The 256-bit fingerprint in numpy, written from the definition in csrc/kernels/fingerprint_hash.h.

The module shares no code with the kernel or the kernel's simulation.
"""

from __future__ import annotations

import struct

import numpy as np

PIECE = 1 << 20
LANES = 4


def key(words: int) -> np.ndarray:
    """Return the first words of the key."""
    x = np.arange(words, dtype=np.uint32) ^ np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return x ^ (x >> np.uint32(16))


KEY = key(PIECE // 4 + 2 * LANES)


def digest(data: bytes) -> bytes:
    """Return the fingerprint of a piece as four 64-bit lanes."""
    assert len(data) <= PIECE
    words = np.frombuffer(data + bytes(-len(data) % 8), "<u4")
    lanes = []
    for lane in range(LANES):
        summed = words + KEY[2 * lane : 2 * lane + len(words)]
        products = summed[0::2].astype(np.uint64) * summed[1::2].astype(np.uint64)
        factor = 0x9E3779B97F4A7C15 + 2 * lane
        lanes.append((int(products.sum(dtype=np.uint64)) + len(data) * factor) % (1 << 64))
    return struct.pack("<4Q", *lanes)


def digests(data: bytes) -> bytes:
    """Return the fingerprints of all 1 MiB pieces, in order."""
    return b"".join(digest(data[at : at + PIECE]) for at in range(0, len(data), PIECE))
