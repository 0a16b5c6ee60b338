"""Fixtures: a process that imports tensors, and shareable memory."""

from __future__ import annotations

import pytest
from importing_process import importing_process, release_shared
from warm_processes import WarmPopen

import memsaver
from memsaver import simulator

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def _process():
    with importing_process(WarmPopen) as process:
        yield process


@pytest.fixture
def importer(make, _process, options):
    """Yield a process that imports tensors; afterwards it has none."""
    options(importer_seconds=10)
    yield _process
    _process.forget()


@pytest.fixture
def own_importer(make, options):
    """Yield a process for one test, which may end it."""
    options(importer_seconds=10)
    with importing_process(WarmPopen) as process:
        yield process


@pytest.fixture
def name(tag):
    return tag("weights")


@pytest.fixture
def make(sim, name, wait_until):
    """Create a tensor with contents 0, 1, 2... in the shareable tag; only the test refers to it."""

    def made(*shape, dtype=None, device=None) -> torch.Tensor:
        with memsaver.region(name, backup="host", shareable=True):
            tensor = simulator.empty(shape, dtype=dtype or torch.int32, device=device)
        return tensor.copy_(torch.arange(tensor.numel()).reshape(shape))

    yield made
    release_shared(wait_until)
