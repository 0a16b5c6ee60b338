"""Tests that calls on two ranks with one GPU each succeed on all ranks or on none.

The tests cover memory, contents, and a resume that does not fit. Each rank queries both GPUs,
because a call's guarantees apply to all ranks once the call returns on any rank.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from torch_environment import run_on_ranks

RANK = """
import datetime, os, sys
import torch
import torch.distributed as dist
import memsaver
import memsaver.distributed as md

GIB = 1 << 30
RANK, BACKEND = int(os.environ["RANK"]), sys.argv[1]
torch.cuda.set_device(RANK)
dist.init_process_group(BACKEND, timeout=datetime.timedelta(seconds=60))
# Each rank holds another size, so that one is done before the other.
SIZES = {0: (2 * GIB, 4 * GIB), 1: (6 * GIB, 40 * GIB)}


def free():
    return [torch.cuda.mem_get_info(device)[0] for device in range(2)]


def grown(before):
    return [now - then for now, then in zip(free(), before)]


def given_back(amounts, tags):
    sizes = [sum(size for tag, size in zip(("weights", "kv_cache"), SIZES[d]) if tag in tags)
             for d in range(2)]
    assert all(amount >= 0.98 * size for amount, size in zip(amounts, sizes)), (amounts, sizes)


def together(value):
    everyones = [None, None]
    dist.all_gather_object(everyones, value)
    return everyones


weights_bytes, kv_bytes = SIZES[RANK]
with memsaver.region("weights", backup="host"):
    weights = torch.randint(-128, 128, (weights_bytes,), dtype=torch.int8, device="cuda")
with memsaver.region("kv_cache", backup="none"):
    kv = torch.full((kv_bytes,), 7, dtype=torch.int8, device="cuda")
before = memsaver.fingerprint(weights)
addresses = weights.data_ptr(), kv.data_ptr()
free()  # starts this process's context on the other GPU
dist.barrier()

mapped = free()
dist.barrier()
report = md.pause("weights", "kv_cache")
given_back(grown(mapped), {"weights", "kv_cache"})
dist.barrier()
asleep = free()

# A trainer on the second GPU leaves no room there: nobody wakes up.
filler = torch.empty(asleep[1] - 20 * GIB, dtype=torch.int8, device="cuda") if RANK == 1 else None
dist.barrier()
full = free()
dist.barrier()
try:
    md.resume("weights", "kv_cache")
except md.RankError as error:
    assert list(error.failures) == [1] and not error.stuck, error
    assert error.failures[1].kind == "OutOfDeviceMemoryError", error
    texts = together(str(error))
    assert texts[0] == texts[1] and "rank 1" in texts[0], texts
else:
    raise AssertionError("there was no room on rank 1")
assert [str(memsaver.state(tag)) for tag in ("weights", "kv_cache")] == ["paused", "paused"]
assert all(abs(amount) <= 64 << 20 for amount in grown(full)), grown(full)
dist.barrier()

# In two stages, once there is room.
del filler
torch.cuda.empty_cache()
dist.barrier()
md.resume("weights")
assert memsaver.fingerprint(weights) == before
assert str(memsaver.state("kv_cache")) == "paused"
md.resume("kv_cache")
assert (weights.data_ptr(), kv.data_ptr()) == addresses
assert not kv.any(), "what had no backup comes back as zeros"
dist.barrier()

mapped = free()
dist.barrier()
with md.paused("weights"):
    given_back(grown(mapped), {"weights"})
    dist.barrier()
assert memsaver.fingerprint(weights) == before
if "nccl" in BACKEND:  # over memory that was paused
    total = weights[:1024].to(torch.int32)
    dist.all_reduce(total)
    parts = together(weights[:1024].cpu())
    assert torch.equal(total.cpu(), sum(part.to(torch.int32) for part in parts))
dist.barrier()
print("held", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["nccl", "gloo", "cpu:gloo,cuda:nccl"])
def test_all_ranks_or_none(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(RANK))
    said = run_on_ranks([sys.executable, str(script), backend], 2)
    assert all("held" in text for text in said), "\n".join(said)
