"""Simulated memory with known bytes and the library's fingerprints of this memory."""

from __future__ import annotations

import random

from memsaver import simulator
from memsaver._runtime.native import _C


class Memory:
    """Simulated memory with random bytes."""

    def __init__(self, sim, nbytes):
        self.buffer = simulator.buffer(nbytes)
        self.address, self.nbytes = self.buffer.address, nbytes
        self.data = random.Random(1).randbytes(nbytes)
        sim.write(self.address, self.data)


def found(address, nbytes):
    return _C.fingerprint([(address, nbytes)])
