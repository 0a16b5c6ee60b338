"""The model of a soak test's memory: its tensors and their expected contents."""

from __future__ import annotations

import hashlib
import random
import time
from typing import Any

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError
from soak.memory import Memory

# The contents of a paused tag after its resume.
KEPT, ZERO, UNKNOWN = "kept", "zero", "unknown"


class Wrong(AssertionError):
    """memsaver broke a promise."""


class Digests:
    """Digests of device memory, based on fingerprints that are computed on the device."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._zeros: dict[int, bytes] = {}
        self.bytes = 0

    def of(self, tensor: Any, nbytes: int) -> bytes:
        """Return the digest. Retries while other processes leave no memory for the computation."""
        for attempt in range(50):
            try:
                rows = _C.fingerprint([(self._memory.address(tensor), nbytes)])
                break
            except MemsaverError as error:
                if attempt == 49 or not self._memory.is_out_of_memory(error):
                    raise
                self._memory.let_go()
                time.sleep(0.1)
        self.bytes += nbytes
        return hashlib.blake2b(rows, digest_size=16).digest()

    def of_zeros(self, tensor: Any, nbytes: int) -> bytes:
        """Return the digest of `nbytes` zeros.

        Zeroes the tensor if this digest is not known yet.
        """
        if nbytes not in self._zeros:
            self._memory.zero(tensor)
            self._zeros[nbytes] = self.of(tensor, nbytes)
        return self._zeros[nbytes]


class Piece:
    """A tensor with the digest of its contents while its tag is mapped."""

    def __init__(self, memory: Memory, digests: Digests, nbytes: int) -> None:
        self.nbytes = nbytes
        self.tensor = memory.tensor(nbytes)
        self.address = memory.address(self.tensor)
        self._memory = memory
        self._digests = digests
        self._zeros = digests.of_zeros(self.tensor, nbytes)
        self.fill()

    def fill(self) -> None:
        """Write new contents."""
        self._memory.fill(self.tensor)
        self._digest = self._digests.of(self.tensor, self.nbytes)

    def check(self, contents: str) -> None:
        """Raise Wrong if the contents or the address are not as expected."""
        if self._memory.address(self.tensor) != self.address:
            raise Wrong("a tensor has moved")
        found = self._digests.of(self.tensor, self.nbytes)
        if contents == UNKNOWN:
            self.fill()
        elif found != (self._zeros if contents == ZERO else self._digest):
            raise Wrong(f"{self.nbytes} bytes at {self.address:#x} are not what they were")
        else:
            self._digest = found


class SoakedTag:
    """A tag with its tensors and their contents after a resume."""

    def __init__(self, name: str, backup: str, cap: int) -> None:
        self.name = name
        self.backup = backup
        self.cap = cap
        self.pieces: list[Piece] = []
        self.contents = KEPT
        self.known = False  # whether a region has created it
        self.graph: Any = None

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    def drop_graph(self) -> None:
        """Delete the graph and release its memory to torch."""
        if self.graph is not None:
            self.graph.close()
        self.graph = None

    @property
    def state(self) -> memsaver.State:
        return memsaver.state(self.name)

    def was_paused(self, backup: str | None) -> None:
        """Record a pause with this backup."""
        self.contents = ZERO if (backup or self.backup) == "none" else KEPT

    def check_mapped(self) -> None:
        """Check that all contents are intact after a resume or a failed pause."""
        if self.state != "mapped":
            raise Wrong(f"{self.name} is {self.state}, and should be mapped")
        for piece in self.pieces:
            piece.check(self.contents)
        self.contents = KEPT

    def check_explained(self, randomness: random.Random) -> None:
        """Check that `explain` finds the tag from the address of one of its bytes."""
        if not self.pieces:
            return
        piece = randomness.choice(self.pieces)
        offset = randomness.randrange(piece.nbytes)
        found = memsaver.explain(piece.address + offset)
        if (found.tag, found.state) != (self.name, self.state):
            raise Wrong(f"a byte of {self.name}, which is {self.state}: {found}")
        missing = found.allocation is None or (found.in_segment and found.tensor is None)
        if missing or found.offset != offset:
            raise Wrong(f"{offset} bytes into a tensor of {self.name}: {found}")
