"""Fixtures: processes that import or send a tensor, and shareable memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
from importing_process import importing_process, release_shared
from warm_processes import WarmPopen

import memsaver
from memsaver import simulator
from memsaver._memory.sharing import exporter, peers

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def _process():
    with importing_process(WarmPopen) as process:
        yield process


@pytest.fixture
def importer(make, _process, options):
    """Yield a process that imports tensors and that must have released all tensors at the end of
    the test."""
    options(importer_seconds=10)
    yield _process
    _process.forget()


@pytest.fixture
def own_importer(make, options):
    """Yield a process for a single test; the test can terminate the process."""
    options(importer_seconds=10)
    with importing_process(WarmPopen) as process:
        yield process


@pytest.fixture
def name(tag):
    return tag("weights")


@pytest.fixture
def make(sim, name, wait_until):
    """Create a tensor with contents 0, 1, 2... in the shareable tag; only the test refers to the
    tensor.
    """

    def made(*shape, dtype=None, device=None) -> torch.Tensor:
        with memsaver.region(name, backup="host", shareable=True):
            tensor = simulator.empty(shape, dtype=dtype or torch.int32, device=device)
        return tensor.copy_(torch.arange(tensor.numel()).reshape(shape))

    yield made
    release_shared(wait_until)


SENDER = """
import os, sys, torch, memsaver
from multiprocessing.reduction import ForkingPickler
from memsaver import simulator
with memsaver.region("w", shareable=True):
    tensor = simulator.empty(1 << 20, dtype=torch.int32)
tensor.fill_(6)
for user in sys.argv[1:]:
    os.setuid(int(user))
sys.stdout.buffer.write(bytes(ForkingPickler.dumps(tensor)).hex().encode() + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture
def sender(sim, wait_until, tmp_path, request):
    """Yield a process that has sent a tensor, and the message that it sent.

    The fixture's parameter is the process's user ID.
    """
    script = tmp_path / "sender.py"
    script.write_text(SENDER)
    users = [request.param] if hasattr(request, "param") else []
    process = WarmPopen(
        [sys.executable, str(script), *map(str, users)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        yield process, bytes.fromhex(process.stdout.readline().decode())
        process.kill()
    wait_until(lambda: not set(peers._peers) - {exporter.endpoint()})
