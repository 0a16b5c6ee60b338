"""The fake NCCL library of tests/fixtures/nccl and its communicators."""

from __future__ import annotations

import ctypes
from pathlib import Path

from built_sources import built
from repository import ROOT

from memsaver.integrations.engine.nccl import Communicator, Nccl

SOURCE = ROOT / "tests" / "fixtures" / "nccl" / "nccl.c"


class FakeNccl:
    """A loaded fake library.

    Attributes:
        nccl: memsaver's interface to the library.
    """

    def __init__(self) -> None:
        self._c = ctypes.CDLL(str(built("libnccl.so.2", [SOURCE])))
        self._c.fake_comm.restype = ctypes.c_void_p
        self._c.fake_comm.argtypes = [ctypes.c_char_p, ctypes.c_int, *2 * [ctypes.c_uint64]]
        self._c.fake_use.argtypes = [ctypes.c_void_p]
        self._c.fake_fail.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.nccl = Nccl(self._c)

    def set_version(self, version: int) -> None:
        """Set the version that the library reports. All fakes in a process share the version."""
        self._c.fake_set_version(version)

    def communicator(
        self,
        shared: Path,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        nbytes: int,
        keeps: int = 1 << 20,
    ) -> Communicator:
        """Return a communicator that can suspend `nbytes` bytes and keeps `keeps` bytes.

        With NCCL_CUMEM_ENABLE=0, NCCL counts 0 bytes of each kind.
        """
        path = str(shared / name).encode()
        handle = self._c.fake_comm(path, len(ranks), nbytes, keeps)
        return Communicator(name, ranks, rank, handle, self.nccl)

    def is_usable(self, communicator: Communicator) -> bool:
        """Return whether a collective of the communicator would succeed."""
        return bool(self._c.fake_use(communicator.handle) == 0)

    def fail(self, communicator: Communicator, status: int) -> None:
        """Make the communicator's next suspend call return an error before it waits for others."""
        self._c.fake_fail(communicator.handle, status)
