"""Fixtures for the tests of a sleep controller: worlds with an engine object or a server.

With the plugin, the fake's schedulers use memsaver on the simulated driver; without it, they use
another saver. In both cases they end after a call that would end SGLang.
"""

from __future__ import annotations

import contextlib

import pytest
import sglang_stand_in as stand_in
from sleep_worlds import MIB, World

from memsaver.integrations.sglang import hooks


@pytest.fixture
def make_world(monkeypatch, sim, tag, make_blocks):
    """Create worlds: `make_world("local" | "server", guarded=True)`."""

    def forget(processes):
        for process in processes:
            process.model = process.blocks = None

    with contextlib.ExitStack() as cleanup:

        def make(kind: str, guarded: bool = True, schedulers: int = 1) -> World:
            classes = cleanup.enter_context(stand_in.modules(monkeypatch))
            if guarded:
                hooks.install()
            processes = [classes.Scheduler(classes.Updater) for _ in range(schedulers)]
            if guarded and schedulers == 1:
                tag.names.extend(stand_in.TAGS)
                processes[0].model = make_blocks("weights", [2 * MIB], backup="host")[0]
                processes[0].blocks = [
                    make_blocks("kv_cache", [4 * MIB], backup="none"),
                    make_blocks("cuda_graph", [2 * MIB], backup="host"),
                ]
            manager = classes.Tokenizer(processes)
            engine = (stand_in.Engine if kind == "local" else stand_in.Server)(manager)
            cleanup.callback(engine.shutdown)
            cleanup.callback(forget, processes)
            return World(manager, engine if kind == "local" else engine.url, guarded, sim)

        yield make


@pytest.fixture(params=["local", "server"])
def kind(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["guarded", "bare"])
def world(request, kind, make_world):
    world = make_world(kind, request.param)
    yield world
    world.check_alive()
