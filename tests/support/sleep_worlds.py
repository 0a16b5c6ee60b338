"""A fake engine, its actual state, and a sleep controller for it."""

from __future__ import annotations

import contextlib

import sglang_stand_in as stand_in

import memsaver
from memsaver.integrations.sglang.sleep import SleepController

MIB = 1 << 20
ALL = frozenset(stand_in.TAGS)


class World:
    """An engine, its actual state, and a controller for it."""

    def __init__(self, manager, target, guarded: bool, sim=None) -> None:
        self.manager, self.target, self.guarded, self.sim = manager, target, guarded, sim
        self.scheduler = manager.schedulers[0]
        self.controller = SleepController(target, timeout=5)

    @property
    def released(self) -> frozenset[str]:
        """Return the tags that are actually released, according to the scheduler and the saver."""
        updater = self.scheduler.weight_updater
        if self.guarded:
            paused = {tag for tag in ALL if memsaver.state(tag) == "paused"}
        else:
            paused = updater.memory_saver_adapter.paused
        assert paused == updater.offload_tags
        return frozenset(paused)

    @contextlib.contextmanager
    def full(self):
        """Make a resume in the block run out of memory."""
        if self.guarded:
            self.sim.occupy((80 << 30) - self.sim.physical())
            try:
                yield
            finally:
                self.sim.occupy(0)
        else:
            self.scheduler.weight_updater.memory_saver_adapter.full = True
            yield

    def check_alive(self) -> None:
        assert [s.death for s in self.manager.schedulers] == [None] * len(self.manager.schedulers)
