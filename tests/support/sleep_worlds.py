"""Fake engines, their actual state, and their sleep controllers."""

import contextlib

import fake_sglang

import memsaver
from memsaver.integrations.sglang import hooks
from memsaver.integrations.sglang.sleep import SleepController

MIB = 1 << 20
ALL = frozenset(fake_sglang.TAGS)


def started(cleanup, monkeypatch, kind, schedulers=1, *, hooked=False):
    """Start a fake engine; return its manager, and either the engine or the URL of its server.

    Args:
        cleanup: an `ExitStack` that shuts the engine down.
        monkeypatch: pytest's fixture.
        kind: the kind of engine, either "local" or "server".
        schedulers: the number of data-parallel schedulers.
        hooked: whether memsaver's hooks are installed.
    """
    classes = cleanup.enter_context(fake_sglang.modules(monkeypatch))
    if hooked:
        hooks.install()
    manager = classes.Tokenizer([classes.Scheduler(classes.Updater) for _ in range(schedulers)])
    engine = (fake_sglang.Engine if kind == "local" else fake_sglang.Server)(manager)
    cleanup.callback(engine.shutdown)
    manager.engine = engine
    return manager, engine if kind == "local" else engine.url


class World:
    """An engine, its actual state, and its controller."""

    def __init__(self, manager, target, guarded: bool, sim=None) -> None:
        self.manager, self.target, self.guarded, self.sim = manager, target, guarded, sim
        self.scheduler = manager.schedulers[0]
        self.expected_deaths = 0
        self.controller = SleepController(target, timeout=5)

    @property
    def server(self) -> fake_sglang.Server:
        return self.manager.engine

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
        """Make a resume within the block run out of memory."""
        if self.guarded:
            self.sim.occupy((80 << 30) - self.sim.physical())
            try:
                yield
            finally:
                self.sim.occupy(0)
        else:
            self.scheduler.weight_updater.memory_saver_adapter.full = True
            yield

    @property
    def deaths(self) -> int:
        """The number of schedulers that have ended."""
        return sum(scheduler.death is not None for scheduler in self.manager.schedulers)
