"""Fixtures for the tests of SGLang's plugin: fake SGLang modules and a scheduler's memory."""

from __future__ import annotations

import functools

import fake_sglang
import pytest
import scheduler_calls
import sleeping_manager

from memsaver.integrations.sglang import hooks


@pytest.fixture
def version():
    """Return the version of the fake SGLang; a module can override this fixture with several
    versions.
    """
    return "0.5.23"


@pytest.fixture
def sglang(monkeypatch, version):
    """Yield the classes of fake SGLang modules with memsaver's hooks."""
    with fake_sglang.modules(monkeypatch, version) as classes:
        for _ in range(2):  # the second call does nothing
            hooks.install()
        yield classes


@pytest.fixture
def engine(sglang, sim, tag, make_blocks):
    """Yield a scheduler whose weights (with a backup), KV cache and graphs are in tags."""
    tag.names.extend(fake_sglang.TAGS)
    scheduler = sglang.Scheduler(sglang.Updater)
    scheduler_calls.hold(scheduler, make_blocks)
    yield scheduler
    scheduler_calls.let_go(scheduler)


@pytest.fixture
def policy(monkeypatch):
    """Return a function that sets the policy for requests to a sleeping engine."""
    return functools.partial(sleeping_manager.choose, monkeypatch)


@pytest.fixture
def waking(policy):
    """Make engines that are created afterwards wake up for requests."""
    policy("wake")


@pytest.fixture
def manager_modules():
    """Install the fake modules that a fake tokenizer manager needs."""
    with sleeping_manager.modules():
        yield


@pytest.fixture
def manager(monkeypatch):
    """Yield the class of a fake rank with memsaver's hooks; the rank updates a fake model's
    weights."""
    import weight_engine

    with weight_engine.hooked(monkeypatch) as kind:
        yield kind
