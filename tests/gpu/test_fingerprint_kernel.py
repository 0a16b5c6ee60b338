"""Tests the fingerprint kernel on a real GPU, as machine code and as PTX for the driver's JIT."""

from __future__ import annotations

import importlib.util

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]

CODE = """
import os
import random

import torch

import memsaver
from fingerprint_reference import digest, digests
from memsaver._runtime.native import _C

MIB = 1 << 20
rng = random.Random(0)
data = torch.frombuffer(bytearray(rng.randbytes(24 * MIB + 4096)), dtype=torch.uint8)
contents = bytes(data.numpy())
nbytes = len(contents)
plain = data.cuda()
if os.environ.get("CUDA_FORCE_PTX_JIT"):
    own = data.cuda()  # a region would want cuBLAS, which has no PTX
else:
    with memsaver.region("weights", backup="host"):
        own = data.cuda()


def found(tensor, at=0, size=nbytes):
    return _C.fingerprint([(tensor.data_ptr() + at, size)])


assert found(plain) == digests(contents), "plain memory"
assert found(own) == digests(contents), "memory of a region"

# Sizes and alignments; more than a batch of pieces, and blocks with pieces of every kind.
sizes = [rng.choice((16, 300, 5000)) for _ in range(3000)] + [MIB] * 40 + [MIB - 1, MIB // 2 + 16]
rng.shuffle(sizes)
places = []
for limit in sizes:
    size = limit if limit >= MIB // 2 else rng.randrange(1, limit)
    at = rng.randrange(nbytes - size)
    places.append((at - at % rng.choice((1, 2, 4, 16, 512)), size))
expected = b"".join(digest(contents[at : at + size]) for at, size in places)
for tensor in (plain, own):
    ranges = [(tensor.data_ptr() + at, size) for at, size in places]
    result = _C.fingerprint(ranges)
    wrong = [
        (at, size)
        for i, (at, size) in enumerate(places)
        if result[32 * i : 32 * i + 32] != expected[32 * i : 32 * i + 32]
    ]
    assert not wrong, wrong[:10]

# One bit, turned by a copy: torch's kernels have no PTX.
for at in (0, 15, MIB - 1, MIB, nbytes - 1):
    before = found(plain)
    plain[at : at + 1].copy_(plain[at : at + 1].cpu() ^ (1 << rng.randrange(8)))
    after = found(plain)
    assert [before[i : i + 32] != after[i : i + 32] for i in range(0, len(before), 32)] == [
        i == at // MIB for i in range(len(before) // 32)
    ], at

# Other addresses and other memory, after a cycle.
if not os.environ.get("CUDA_FORCE_PTX_JIT"):
    memsaver.pause("weights")
    try:
        found(own)
        raise AssertionError("a paused tag has contents")
    except memsaver.InvalidStateError:
        pass
    memsaver.resume("weights")
assert found(own) == digests(contents), "after a resume"

# No memory of the device.
free = torch.cuda.mem_get_info()[0]
for _ in range(3):
    found(plain)
assert torch.cuda.mem_get_info()[0] == free

if os.environ.get("CUDA_FORCE_PTX_JIT"):
    raise SystemExit  # what follows takes kernels of torch

# Work that was submitted before.
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    torch.cuda._sleep(200_000_000)
    plain.fill_(7)
assert found(plain) == digests(bytes([7]) * nbytes), "work in flight"

# A capture.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    plain.add_(1)
    assert found(own) == digests(contents), "inside a capture"
graph.replay()
assert found(plain) == digests(bytes([8]) * nbytes), "after a replay"
assert memsaver.trim(wait=True) > 0
"""


@pytest.mark.parametrize("environment", [{}, {"CUDA_FORCE_PTX_JIT": "1"}], ids=["binary", "ptx"])
def test_the_gpus_fingerprints_are_those_of_the_reference(run_python, environment):
    run_python(CODE, MEMSAVER_DRIVER=None, timeout=110, **environment)
