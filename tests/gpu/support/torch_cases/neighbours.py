"""Tests backups in another GPU's memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import memsaver
from torch_cases.tensors import MIB, free, is_numbered, numbered

MARGIN = 16 * MIB  # other memory that the driver and torch allocate in the meantime


@contextlib.contextmanager
def _options(**changed: int | str) -> Iterator[None]:
    before = memsaver.options()
    memsaver.configure(**changed)  # type: ignore[arg-type]
    try:
        yield
    finally:
        memsaver.configure(**{name: getattr(before, name) for name in changed})


def _figures(tag: str) -> tuple[int, int]:
    (row,) = memsaver.stats()[tag]
    return row.peer_bytes, row.host_bytes


def case_two_gpus_peer_backup(tag: str) -> None:
    """A backup in the other GPU's memory is restored, and is copied again only after a change."""
    memsaver.device_memory(1)  # starts the device
    with memsaver.region(tag, backup="peer"):
        tensors = [numbered(count, n, "cuda:0") for n, count in enumerate((600, 64, 32))]
    total = 696 * MIB
    for copied in (total, 0, 64 * MIB):
        before = [free(device) for device in range(2)]
        report = memsaver.pause(tag)
        after = [free(device) for device in range(2)]
        assert report.copied_bytes == copied, report
        assert after[0] - before[0] >= total - MARGIN
        assert _figures(tag) == (total, 0)
        if copied == total:
            assert abs(before[1] - after[1] - total) <= MARGIN
        memsaver.resume(tag)
        assert is_numbered(tensors[0], 0) and is_numbered(tensors[2], 2)
        assert is_numbered(tensors[1], 1) if copied != 64 * MIB else not tensors[1].any()
        if copied == 0:
            tensors[1].zero_()
    before = [free(device) for device in range(2)]
    assert memsaver.trim(wait=True) >= total
    assert _figures(tag) == (0, 0) and free(1) - before[1] >= total - MARGIN


def case_two_gpus_peer_backup_without_room(tag: str) -> None:
    """Contents that do not fit on the other GPU are saved on the host, and all contents are
    restored.
    """
    torch.zeros(1, device="cuda:1")
    with memsaver.region(tag, backup="peer"):
        tensors = [numbered(count, n, "cuda:0") for n, count in enumerate((600, 64))]
    memsaver.device_memory(1)
    with _options(peer=1, peer_margin_bytes=free(1) - 300 * MIB):
        memsaver.pause(tag)
        there, here = _figures(tag)
        assert 0 < there <= 300 * MIB and there + here == 664 * MIB, (there, here)
        memsaver.resume(tag)
        assert all(is_numbered(tensor, n) for n, tensor in enumerate(tensors))


def case_two_gpus_peer_backup_of_its_own_device(tag: str) -> None:
    """A backup on the tensors' own device is rejected, and the settings do not change."""
    with memsaver.region(tag, backup="peer"):
        tensor = numbered(64, 3, "cuda:0")
    with _options(peer=0), pytest.raises(memsaver.ConfigError, match="memory to save is on it"):
        memsaver.pause(tag)
    assert memsaver.state(tag) == "mapped" and is_numbered(tensor, 3)
