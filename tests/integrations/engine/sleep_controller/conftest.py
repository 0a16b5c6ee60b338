"""Fixtures for the tests of a sleep controller, with an engine object or a server.

With the plugin, the fake's schedulers use memsaver on the simulated driver. Without the plugin, the
schedulers use another memory saver. In both cases, a call that would terminate SGLang terminates
the schedulers, which fails the test.
"""

import contextlib

import fake_sglang
import pytest
import scheduler_calls
from sleep_worlds import World, started


@pytest.fixture
def make_world(monkeypatch, sim, tag, make_blocks):
    """Return a function that creates fake engines with their controllers: `make_world("local" |
    "server", guarded=True)`.
    """

    with contextlib.ExitStack() as cleanup:

        def make(kind: str, guarded: bool = True, schedulers: int = 1) -> World:
            manager, target = started(cleanup, monkeypatch, kind, schedulers, hooked=guarded)
            if guarded and schedulers == 1:
                tag.names.extend(fake_sglang.TAGS)
                (scheduler,) = manager.schedulers
                scheduler_calls.hold(scheduler, make_blocks)
                cleanup.callback(scheduler_calls.let_go, scheduler)
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
