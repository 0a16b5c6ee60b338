"""Fixtures: a process that imports tensors, and shareable memory."""

from __future__ import annotations

import pytest
from importing_process import importing_process

import memsaver
from memsaver import simulator
from memsaver._memory.sharing import sending

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def _process():
    with importing_process() as process:
        yield process


@pytest.fixture
def importer(sim, _process, wait_until, options):
    """Yield a process that imports tensors; afterwards it has none, and nothing is kept for it."""
    options(importer_seconds=10)
    yield _process
    _process.forget()
    _end_flights(wait_until)


@pytest.fixture
def own_importer(sim, wait_until, options):
    """Yield a process for one test, which may end it."""
    options(importer_seconds=10)
    with importing_process() as process:
        yield process
    _end_flights(wait_until)


def _end_flights(wait_until):
    for token in list(sending._in_flight):
        sending.take(token)
    wait_until(lambda: sending.kept() == 0)


@pytest.fixture
def name(tag):
    return tag("weights")


@pytest.fixture
def make(sim, name):
    """Create a tensor with contents 0, 1, 2... in the shareable tag."""

    def made(*shape, dtype=None, device=None) -> torch.Tensor:
        with memsaver.region(name, backup="host", shareable=True):
            tensor = simulator.empty(shape, dtype=dtype or torch.int32, device=device)
        return tensor.copy_(torch.arange(tensor.numel()).reshape(shape))

    return made
