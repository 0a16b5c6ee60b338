"""Tests tensors on two devices in one process."""

from __future__ import annotations

from typing import Any

import torch

import memsaver
from torch_cases.tensors import MIB, free, inside, is_numbered, numbered


def case_two_gpus_region_names_both(tag: str) -> None:
    """One region can contain tensors on two devices, which are paused and resumed together."""
    with memsaver.region(tag, backup="host", device=[0, 1]):
        here, there = numbered(64, 1, "cuda:0"), numbered(64, 2, "cuda:1")
    with memsaver.region(tag, device="cuda:1"):
        outside = numbered(8, 3, "cuda:0")
    assert inside(here, tag) and inside(there, tag)
    if memsaver.is_preloaded():  # the cudaMalloc hook ignores `device`
        outside = numbered(8, 3, "cuda:0")
    assert not inside(outside, tag)
    before = [free(device) for device in range(2)]
    report = memsaver.pause(tag)
    assert [change.device for change in report.changes] == [0, 1]
    assert report.copied_bytes == 128 * MIB
    for device in range(2):
        assert free(device) - before[device] >= 64 * MIB - 16 * MIB
    memsaver.resume(tag)
    assert is_numbered(here, 1) and is_numbered(there, 2) and is_numbered(outside, 3)


def _copies_between(source: torch.Tensor, target: torch.Tensor, number: int) -> None:
    """Check contiguous copies (a memory copy) and strided copies (a kernel on the source's
    device).
    """
    target.zero_()
    torch.cuda.synchronize(target.device)
    target.copy_(source)
    assert is_numbered(target, number)
    target.zero_()
    torch.cuda.synchronize(target.device)
    wide_source, wide_target = source.view(-1, 64), target.view(-1, 64)
    wide_target[:, ::2].copy_(wide_source[:, ::2])
    wide_target[:, 1::2].copy_(wide_source[:, 1::2])
    assert is_numbered(target, number)
    moved = wide_source[:, ::4].to(target.device)
    assert torch.equal(moved.cpu(), wide_source.cpu()[:, ::4])


def case_two_gpus_copies(tag: str) -> None:
    """Copies between a region and ordinary memory on two devices work before and after a resume."""
    tensors: dict[tuple[str, str], Any] = {}
    for device in ("cuda:0", "cuda:1"):
        # In the first iteration, the other device has no context in this process yet.
        with memsaver.region(tag, backup="host", device=device):
            tensors["region", device] = numbered(64, 1, device)
        tensors["plain", device] = numbered(64, 1, device)
    for round_trip in range(2):
        for source in ("region", "plain"):
            for target in ("region", "plain"):
                for here, there in (("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")):
                    try:
                        _copies_between(tensors[source, here], tensors[target, there], 1)
                    except Exception as error:
                        raise AssertionError(
                            f"{source} memory on {here} to {target} memory on {there}, "
                            f"{'after' if round_trip else 'before'} a pause: {error}"
                        ) from error
        memsaver.pause(tag)
        memsaver.resume(tag)
        assert is_numbered(tensors["region", "cuda:0"])
