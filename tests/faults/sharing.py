"""Exports and imports under faults."""

from __future__ import annotations

import os
from typing import Any

from faults.machine import Machine
from faults.scenario import SMALL_GRANULE, Scenario, require


class Share(Scenario):
    """Exports of a tag's extents and their import in the same process."""

    granule = SMALL_GRANULE

    def __init__(self, machine: Machine, name: str) -> None:
        super().__init__(machine, name)
        self.shared = self.group("shared", "host")
        self.record: Any = None
        self.span: Any = None
        self.rows: list[Any] = []

    def build(self) -> None:
        super().build()
        with self.memsaver.region(self.shared.names[0], shareable=True):
            pass
        self.shared.allocate([4096, 3 * self.granule // 2, 35 * self.granule])
        self.shared.fill()
        from memsaver._runtime.native import _C

        _C.release_requests()  # kept by the process

    def prepare(self) -> None:
        self.rows = []

    def act(self) -> None:
        from memsaver._runtime.native import _C

        ranges = [(block.address, block.nbytes) for block, _ in self.shared.blocks]
        record = _C.Importer(os.getpid())
        try:
            rows = record.export_extents(ranges)
            try:
                span = _C.ForeignSpan(0, rows[0][3])
                span.map([(row[0] - row[2], row[1], row[6]) for row in rows])
            finally:
                for row in rows:
                    os.close(row[6])
        except BaseException:
            record.close()
            raise
        self.record, self.span, self.rows = record, span, rows

    def check_unchanged(self, error: Exception) -> None:
        from memsaver._runtime.native import _C

        self.check_bystander()
        require(self.shared.states() == {"mapped"} and self.shared.is_intact(), "contents are lost")
        require(_C.importers() == [], "a process that has nothing is an importer")

    def check_done(self) -> None:
        from memsaver._runtime.native import _C

        self.check_bystander()
        total = sum(row[1] for row in self.rows)
        require(_C.importers() == [(self.shared.names[0], os.getpid(), total)], "not recorded")
        for block, contents in self.shared.blocks:
            address = self.span.address + block.address - self.rows[0][2]
            require(
                self.sim.read(address, block.nbytes) == contents, "other contents were imported"
            )

    def rest(self) -> None:
        if self.record is not None:
            self.span.unmap([row[0] - row[2] for row in self.rows])
            self.record.released([row[4] for row in self.rows])
            self.record.close()
            self.record = self.span = None
        with self.memsaver.paused(*self.shared.names):  # no longer refused
            pass
        require(self.shared.is_intact(), "contents are lost")
        super().rest()
