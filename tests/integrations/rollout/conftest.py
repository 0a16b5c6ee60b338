"""Fixtures for the rollout tests: a colocated session, and functions that run code on ranks.

Without torch, pytest ignores these tests.
"""

import importlib.util
import textwrap

import colocated_ranks
import distributed_ranks
import pytest
import rank_processes
import weight_ranks

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def scene(sim, tag):
    """Yield a colocated session with a trainer and a fake engine on one simulated device."""
    from colocated_scene import Scene  # imports torch

    made = Scene(tag)
    yield made
    made.__dict__.clear()  # pytest keeps the object


@pytest.fixture
def backend(monkeypatch):
    """Yield a fake engine that loads weights as SGLang does, with memsaver's hooks."""
    import weight_engine  # imports torch

    with weight_engine.hooked(monkeypatch) as kind:
        yield weight_engine.Backend(kind)


@pytest.fixture
def engine(backend):
    from memsaver.integrations.rollout import RolloutEngine

    return RolloutEngine(backend, timeout=30)


@pytest.fixture
def run_ranks(tmp_path):
    """Return a function that runs code on the ranks of a trainer with a fake engine:
    `run_ranks(size)(code)`.

    Further arguments contain code that runs before `code`.
    """

    def on(size, *beginnings):
        def run(code):
            text = "".join((weight_ranks.PRELUDE, *beginnings, code, weight_ranks.END))
            said = rank_processes.run(text, size, tmp_path, timeout=110)
            assert all("fine" in text for text in said)

        return run

    return on


@pytest.fixture
def run_colocated(tmp_path):
    """Return a function that runs code on the ranks of a colocated session:
    `run_colocated(size)(code)`.

    Each rank must end with status 0, or with the rank's status in `statuses`.
    """

    def on(size, statuses=None):
        def run(code):
            text = colocated_ranks.PRELUDE + textwrap.dedent(code) + colocated_ranks.END
            distributed_ranks.run(tmp_path, text, size, statuses, timeout=100)

        return run

    return on
