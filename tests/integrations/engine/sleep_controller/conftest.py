"""Fixtures for the tests of a sleep controller: worlds with an engine object or a server.

With the plugin, the fake's schedulers use memsaver on the simulated driver; without it, they use
another saver. In both cases they end after a call that would end SGLang, which fails the test.
"""

from __future__ import annotations

import contextlib

import fake_sglang
import pytest
from sleep_worlds import MIB, World, started


@pytest.fixture
def make_world(monkeypatch, sim, tag, make_blocks):
    """Create worlds: `make_world("local" | "server", guarded=True)`."""

    def forget(processes):
        for process in processes:
            process.model = process.blocks = None

    with contextlib.ExitStack() as cleanup:

        def make(kind: str, guarded: bool = True, schedulers: int = 1) -> World:
            manager, target = started(cleanup, monkeypatch, kind, schedulers, hooked=guarded)
            cleanup.callback(forget, manager.schedulers)
            if guarded and schedulers == 1:
                tag.names.extend(fake_sglang.TAGS)
                (scheduler,) = manager.schedulers
                scheduler.model = make_blocks("weights", [2 * MIB], backup="host")[0]
                scheduler.blocks = [
                    make_blocks("kv_cache", [4 * MIB], backup="none"),
                    make_blocks("cuda_graph", [2 * MIB], backup="host"),
                ]
            worlds.append(World(manager, target, guarded, sim))
            return worlds[-1]

        worlds: list[World] = []
        yield make
        for world in worlds:
            assert world.deaths == world.expected_deaths


@pytest.fixture(params=["local", "server"])
def kind(request):
    return request.param


@pytest.fixture(params=[True, False], ids=["guarded", "bare"])
def world(request, kind, make_world):
    return make_world(kind, request.param)
