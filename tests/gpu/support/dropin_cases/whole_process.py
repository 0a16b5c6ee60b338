"""Tests whole-process regions with a trainer and with the checks of torch_memory_saver's
examples.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch_memory_saver import torch_memory_saver as saver

import memsaver
from dropin_cases.memory import GIB, KIB, MIB, free


def used() -> int:
    """Return the bytes in use that the driver reports, without emptying any cache."""
    torch.cuda.synchronize()
    available, total = torch.cuda.mem_get_info(0)
    return total - available


def forward(weights: list[torch.Tensor]) -> float:
    """Run a forward pass whose activations are larger than the weights; return the weights'
    mean.
    """
    ones = torch.ones(GIB, dtype=torch.float32, device="cuda")
    mean = torch.stack([weight.float().mean() for weight in weights]).mean()
    return float((ones * mean).mean().item())


def case_a_training_engine() -> None:
    """A pause releases memory, a disabled block leaves none allocated, and a resume restores
    everything.
    """
    first = torch.full((1_000_000,), 42, dtype=torch.uint8, device="cuda")
    at_first = used()
    weights = [torch.full((n,), 42, dtype=torch.uint8, device="cuda") for n in (GIB, MIB, KIB, 42)]
    assert forward(weights) == 42
    at_work = used()
    assert at_work > at_first + 5 * GIB
    saver.pause()
    paused = used()
    assert paused < at_first + 200 * MIB
    with saver.disable():
        assert used() <= paused + 10 * MIB
        mine = torch.full((GIB,), 53, dtype=torch.uint8, device="cuda")
        assert mine.float().mean().item() == 53
        assert used() > paused + 4 * GIB
        del mine
    after = used()
    assert after <= paused + 10 * MIB, (after - paused) / MIB
    saver.resume()
    back = used() - after
    assert abs(back - (at_work - paused)) < 50 * MIB, (back, at_work - paused)
    resumed = used()
    assert forward(weights) == 42
    assert abs(used() - resumed) <= MIB
    total = torch.cuda.mem_get_info()[1]
    parts = [torch.full((int(total * 0.3),), 42, dtype=torch.uint8, device="cuda") for _ in "ab"]
    parts.clear()
    whole = torch.full((int(total * 0.6),), 42, dtype=torch.uint8, device="cuda")
    first += 1
    assert bool((first == 43).all()) and int(whole[-1]) == 42


def case_disabled_blocks() -> None:
    """Disabled blocks can be nested with regions; tensors from these blocks stay usable during a
    pause.
    """
    forward([torch.ones(MIB, device="cuda")])
    before = used()
    for is_warm in (False, True, True):  # the first round uses 64 MiB more on an H200
        with saver.disable():
            kept = torch.ones(64 * MIB, device="cuda")
            with saver.region("a"):
                inside = torch.ones(64 * MIB, device="cuda")
                with saver.disable():
                    torch.ones(512 * MIB, device="cuda")
            torch.ones(512 * MIB, device="cuda")
        more = 18 * MIB if is_warm else 82 * MIB
        assert 500 * MIB <= used() - before <= 512 * MIB + more, (used() - before) / MIB
        saver.pause("a")
        assert 250 * MIB <= used() - before <= 256 * MIB + more, (used() - before) / MIB
        assert float(kept[-1]) == 1
        saver.resume("a")
        assert float(inside[-1]) == 0
        del kept, inside
        with saver.disable():
            pass
        torch.cuda.empty_cache()
        before = used()


def case_nested_regions() -> None:
    """A region can omit the process's default backup; the end of the region restores the
    default.
    """
    cdll = None
    weight = torch.full((10 * MIB,), 42.0, device="cuda")
    with saver.region(tag="grad_buffer", enable_cpu_backup=False):
        cdll = saver._impl._binary_wrapper.cdll
        inside = (cdll.tms_get_current_tag(), cdll.tms_get_enable_cpu_backup())
        gradient = torch.full((10 * MIB,), 99.0, device="cuda")
    assert inside == (b"grad_buffer", False)
    assert cdll.tms_get_interesting_region() and cdll.tms_get_enable_cpu_backup()
    assert (cdll.tms_get_current_tag(), cdll.tms_get_cpu_backup_backend()) == (
        b"default",
        b"pinned",
    )
    before = used()
    saver.pause()
    assert before - used() >= 75 * MIB
    saver.resume()
    extra = torch.full((10 * MIB,), 7.0, device="cuda")
    saver.pause(), saver.resume()
    assert bool((weight == 42).all()) and bool((extra == 7).all())
    assert bool((gradient.fill_(1) == 1).all())


def case_memory_by_ctypes() -> None:
    """A program that calls the library through ctypes can free a paused allocation of odd size."""
    import ctypes

    library = ctypes.CDLL(None)
    runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
    torch.zeros(1, device="cuda")

    def allocate() -> ctypes.c_void_p:
        pointer = ctypes.c_void_p()
        assert library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(6912)) == 0
        return pointer

    def holds(pointer: ctypes.c_void_p, byte: int) -> bool:
        found = ctypes.create_string_buffer(bytes([byte]) * 6912, 6912)
        size = ctypes.c_size_t(6912)
        assert runtime.cudaMemcpy(pointer, found, size, 1) == 0
        ctypes.memset(found, 0, 6912)
        assert runtime.cudaMemcpy(found, pointer, size, 2) == 0
        return found.raw == bytes([byte]) * 6912

    freed, kept = allocate(), allocate()
    assert holds(freed, 0xA5) and holds(kept, 0xA5)
    assert library.tms_pause(None) == 0
    assert library.cudaFree(freed) == 0
    assert library.tms_resume(None) == 0
    assert holds(kept, 0x5A) and library.cudaFree(kept) == 0


def case_a_whole_trainer() -> None:
    """A trainer whose whole process is one region computes the same results after pauses."""
    assert memsaver.is_preloaded()
    data = torch.randn(64, 2048, device="cuda")

    def trainer() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
        return model, torch.optim.Adam(model.parameters())

    def step(model: Any, optimizer: Any) -> float:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    never_paused = trainer()
    expected = [step(*never_paused) for _ in range(4)]
    del never_paused
    model, optimizer = trainer()
    losses = [step(model, optimizer)]
    weight = next(model.parameters())
    for _ in range(3):
        kept = weight.detach().cpu()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = free()
        saver.pause()
        assert free() - before >= 3 * 8 * 16 * MIB
        assert torch.equal(saver.get_cpu_backup(weight), kept)
        with saver.disable():
            sent = saver.get_cpu_backup(weight).cuda()
            assert torch.equal(sent.cpu(), kept)
            sent.untyped_storage()._share_cuda_()
            del sent
        saver.resume()
        losses.append(step(model, optimizer))
    assert losses == expected
