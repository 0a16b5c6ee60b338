"""Tests the contents of tensors after a pause: the backup's bytes, zeros or NaNs."""

from __future__ import annotations

import tempfile

import torch
from backup_files import deleted_files, first_data, flip, truncate
from expected_errors import raises

import memsaver
from memsaver._runtime.native import _C
from torch_cases.tensors import GIB, MIB, held, is_numbered, numbered, tidy


def case_backup_view(tag: str) -> None:
    """`backup_view` returns the saved contents as a CPU tensor, for every layout and type."""
    with memsaver.region(tag, backup="host"):
        whole = torch.randn(1024, 4096, device="cuda")
        half = torch.randn(333, 77, device="cuda").to(torch.bfloat16)
        scalar = torch.tensor(42, device="cuda")
        flags = torch.rand(1000, device="cuda") > 0.5
        empty = torch.empty(0, 3, device="cuda")
    tensors = [
        whole,
        whole.t(),
        whole[100:200, 7::3],
        whole.view(torch.int32)[5],
        half,
        half[:, 1],
        scalar,
        flags,
        empty,
    ]
    expected = [tensor.cpu() for tensor in tensors]
    with raises(memsaver.InvalidStateError):
        memsaver.backup_view(whole)
    plain = numbered(1)
    with raises(memsaver.ConfigError):
        memsaver.backup_view(plain)
    memsaver.pause(tag)
    for tensor, wanted in zip(tensors, expected, strict=True):
        view = memsaver.backup_view(tensor)
        assert view.device.type == "cpu" and view.dtype == tensor.dtype
        assert view.shape == tensor.shape
        assert tensor.numel() == 0 or view.stride() == tensor.stride()
        assert torch.equal(view, wanted)
    memsaver.backup_view(whole, writable=True)[0] = 7.0  # the resume restores the change
    memsaver.resume(tag)
    expected[0][0] = 7.0
    assert torch.equal(whole.cpu(), expected[0])
    assert torch.equal(half.cpu(), expected[4])
    memsaver.pause(tag, backup="none")
    with raises(memsaver.InvalidStateError):
        memsaver.backup_view(whole)
    memsaver.resume(tag)
    assert not whole.any()


def case_poison(tag: str) -> None:
    """Poison fills only memory without a backup with NaNs, even in a swap."""
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    kept_tag = f"{tag} kept"
    with memsaver.region(kept_tag, backup="host"):
        kept = numbered(20)
    with memsaver.region(tag):
        lost = [torch.zeros(3 * MIB, dtype=kind, device="cuda") for kind in kinds]
        whole = torch.zeros(1000, dtype=torch.int32, device="cuda")

    def came_back() -> bool:
        return all(bool(t.isnan().all()) for t in lost) and bool((whole == -1).all())

    memsaver.configure(poison=True)
    try:
        memsaver.pause()
        memsaver.resume()
        assert came_back()
        assert is_numbered(kept)
        for tensor in (*lost, whole):
            tensor.zero_()
        memsaver.pause(tag)
        memsaver.swap(out=kept_tag, into=tag)
        assert came_back()
        memsaver.resume(kept_tag)
        assert is_numbered(kept)
    finally:
        memsaver.configure(poison=False)
    memsaver.pause(tag)
    memsaver.resume(tag)
    assert not any(bool(t.any()) for t in (*lost, whole))


def case_damaged_disk_backup(tag: str) -> None:
    """After damage to a backup file, the next pause saves the reloaded contents again."""
    with tempfile.TemporaryDirectory() as folder:
        before = _C.option("disk_dir")
        memsaver.configure(disk_dir=folder)
        try:
            with memsaver.region(tag, backup="disk"):
                tensor = numbered(64)
            for damage in (flip, truncate):
                memsaver.pause(tag)
                (file,) = deleted_files(folder)
                damage(file, first_data(file) + 40 * MIB)
                for _ in range(2):
                    with raises(memsaver.BackupError):
                        memsaver.resume(tag)
                    assert memsaver.state(tag) == "paused" and held(tag) == 0
                del tensor
                tidy()
                memsaver.resume(tag)
                with memsaver.region(tag):
                    tensor = numbered(64)
                assert memsaver.pause(tag).copied_bytes >= 64 * MIB
                memsaver.resume(tag)
                assert is_numbered(tensor)
                del file
        finally:
            memsaver.configure(disk_dir=before)


def case_work_in_flight_is_awaited(tag: str) -> None:
    """A pause waits for GPU work that was submitted earlier on any stream."""
    with memsaver.region(tag, backup="host"):
        target = torch.zeros(64 * MIB, dtype=torch.int32, device="cuda")
        other = torch.zeros(64 * MIB, dtype=torch.int32, device="cuda")
    source = numbered(256)
    side = torch.cuda.Stream()
    for _ in range(2):
        target.zero_()
        other.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(300_000_000)  # cycles: about 0.15 s
        target.copy_(source)
        done = torch.cuda.Event()
        done.record()
        with torch.cuda.stream(side):
            torch.cuda._sleep(300_000_000)
            other.copy_(source)
            side_done = torch.cuda.Event()
            side_done.record()
        assert not done.query() and not side_done.query(), "nothing is in flight"
        memsaver.pause(tag)
        assert done.query() and side_done.query()
        memsaver.resume(tag)
        assert is_numbered(target)
        assert is_numbered(other)
    # The same without a backup, if only the wait delays the release of the memory.
    torch.cuda._sleep(300_000_000)
    target.copy_(source)
    memsaver.pause(tag, backup="none")
    torch.cuda.synchronize()
    memsaver.resume(tag)
    assert not target.any()


def case_discarded_memory_reads_as_zero(tag: str) -> None:
    """After a pause without a backup, the tag's whole memory reads as zero at unchanged
    addresses.
    """
    with memsaver.region(tag, backup="none"):
        tensors = [numbered(count, 3) for count in (1, 2, 3, 64, 1100)]
        tensors += [torch.ones(100, device="cuda") for _ in range(50)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for _ in range(2):
        report = memsaver.pause(tag)
        assert report.copied_bytes == 0
        # Make the driver's next free memory nonzero.
        dirty = torch.full((2 * GIB,), 255, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        del dirty
        tidy()
        memsaver.resume(tag)
        assert not any(bool(tensor.any()) for tensor in tensors)
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        for tensor in tensors:
            tensor.fill_(7)
    with raises(memsaver.UnknownTagError):
        memsaver.pause(tag + ".unknown")
