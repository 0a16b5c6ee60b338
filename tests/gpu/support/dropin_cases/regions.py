"""Tests regions, graphs and backups in each hook mode, on one or two devices."""

from __future__ import annotations

import os

import torch
from torch_memory_saver import torch_memory_saver as saver

from dropin_cases.memory import GIB, KIB, MIB, free, numbers, sum_of


def case_cycles() -> None:
    """Weights with a backup and a cache without a backup can be paused and resumed separately."""
    with saver.region(tag="weights", enable_cpu_backup=True):
        weights = [numbers(64, n) for n in range(8)]
    with saver.region(tag="kv_cache"):
        cache = torch.zeros(512 * MIB, dtype=torch.uint8, device="cuda")
    sums = [sum_of(tensor) for tensor in weights]
    addresses = [tensor.data_ptr() for tensor in (*weights, cache)]
    for _ in range(3):
        cache.fill_(3)
        before = free()
        saver.pause("kv_cache")
        saver.pause("weights")
        assert free() - before >= 1000 * MIB
        saver.resume("weights")
        assert [sum_of(tensor) for tensor in weights] == sums
        saver.resume("kv_cache")
        assert before - free() < 64 * MIB
        assert not cache.any()
        assert addresses == [tensor.data_ptr() for tensor in (*weights, cache)]


def case_regions_of_one_tag() -> None:
    """Each tensor of a tag has the backup that its region requested."""
    with saver.region(enable_cpu_backup=True):
        kept = numbers(32)
    with saver.region():
        plain = numbers(32)
    with saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"):
        pageable = numbers(32, 1)
    with saver.region(enable_disk_backup=True):
        disk = numbers(32, 2)
    sums = [sum_of(tensor) for tensor in (kept, pageable, disk)]
    saver.pause()
    saver.resume()  # makes the library's permanent device allocations
    before = free()
    saver.pause()
    # Pinning the backup again uses a little device memory.
    assert free() - before >= 124 * MIB, (free() - before) / MIB
    saver.pause()
    saver.resume()
    saver.resume()
    assert [sum_of(tensor) for tensor in (kept, pageable, disk)] == sums
    assert not plain.any()


def case_graphs_of_one_pool() -> None:
    """Several graphs can share one pool, one stream and one tag, as they do in an engine."""
    source = torch.ones(16 * MIB, device="cuda")
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs, results = [], []
    before = free()
    for number in range(4):
        graphs.append(torch.cuda.CUDAGraph())
        with saver.cuda_graph(cuda_graph=graphs[-1], pool=pool, stream=stream, tag="cuda_graph"):
            results.append((source * (number + 1)).sum())
    taken = before - free()
    assert 64 * MIB <= taken < 3 * 64 * MIB  # the graphs share memory
    with saver.region("kv_cache"):
        cache = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        before = free()
        saver.pause(tag="kv_cache")
        saver.pause(tag="cuda_graph")
        assert free() - before >= (256 + 64) * MIB
        saver.resume(tag="cuda_graph")
        saver.resume(tag="kv_cache")
        for number, graph in enumerate(graphs):
            graph.replay()
            assert results[number].item() == (number + 1) * 16 * MIB
    del cache


def case_a_graph_with_a_backup() -> None:
    """A resume restores a graph's memory, so no replay is necessary."""
    source = torch.arange(MIB, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with saver.cuda_graph(graph, tag="g", enable_cpu_backup=True, capture_error_mode="relaxed"):
        result = source * 3
    graph.replay()
    expected = sum_of(result)
    saver.pause("g")
    saver.resume("g")
    assert sum_of(result) == expected


def case_get_cpu_backup() -> None:
    """`get_cpu_backup` returns a copy of a paused tensor on the CPU, and None for a mapped
    tensor.
    """
    with saver.region(tag="weights", enable_cpu_backup=True):
        tensor = torch.randn(1000, 300, dtype=torch.float32, device="cuda")
        half = torch.randn(333, dtype=torch.bfloat16, device="cuda")
    expected = [tensor.cpu(), half.cpu()]
    assert saver.get_cpu_backup(tensor) is None
    assert saver.get_cpu_backup(torch.ones(3, device="cuda")) is None
    saver.pause("weights")
    for zero_copy in (False, True):
        found = [saver.get_cpu_backup(one, zero_copy=zero_copy) for one in (tensor, half)]
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    found[0][0] = 5.0  # a zero-copy view: the resume restores the change
    saver.resume("weights")
    assert bool((tensor[0] == 5.0).all()) and torch.equal(tensor[1:].cpu(), expected[0][1:])


def case_disable() -> None:
    """Memory that is allocated under disable() is not paused and can be sent to another process."""
    with saver.region("a"):
        inside = numbers(32)
        with saver.disable():
            outside = numbers(32)
    expected = sum_of(outside)
    saver.pause("a")
    assert sum_of(outside) == expected
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        outside.untyped_storage()._share_cuda_()
    saver.resume("a")
    assert not inside.any()


def case_margin() -> None:
    """An allocation in a region leaves the margin unallocated."""
    torch.zeros(1, device="cuda")
    saver.memory_margin_bytes = free() - 256 * MIB
    with saver.region("a"):
        small = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            pass
        else:
            raise AssertionError("the margin was not left")
        saver.memory_margin_bytes = 0
        large = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
    assert sum_of(small) + sum_of(large) == 576 * MIB


def case_two_devices() -> None:
    """A region applies to every GPU in use with preloading, and to the current GPU without
    preloading.
    """
    for device in (0, 1):
        torch.zeros(1, device=f"cuda:{device}")
    with saver.region("a", enable_cpu_backup=True):
        tensors = [numbers(64, device, f"cuda:{device}") for device in (0, 1)]
    sums = [sum_of(tensor) for tensor in tensors]
    before = [free(device) for device in (0, 1)]
    saver.pause("a")
    given = [free(device) - then >= 60 * MIB for device, then in zip((0, 1), before, strict=True)]
    assert given == [True, saver.hook_mode == "preload"], given
    saver.resume("a")
    assert [sum_of(tensor) for tensor in tensors] == sums


def case_retained_backups() -> None:
    """A retained backup keeps its address until a resume discards the backup."""
    for backend in ("pinned", "mmap"):
        with saver.region(backend, enable_cpu_backup=True, cpu_backup_backend=backend):
            tensor = numbers(2, 5)
        with saver.region("other", enable_cpu_backup=True):
            other = numbers(2, 6)
        saver.pause(backend)
        pointer = saver.get_cpu_backup(tensor, zero_copy=True).data_ptr()
        for step in range(3):
            expected = saver.get_cpu_backup(tensor)
            saver.retain_cpu_backup = True
            saver.resume(backend)
            saver.retain_cpu_backup = False  # affects only later resumes
            shown = saver.get_cpu_backup(tensor, zero_copy=True)
            assert shown.data_ptr() == pointer and torch.equal(shown, expected)
            assert torch.equal(tensor.cpu(), expected) and saver.get_cpu_backup(other) is None
            tensor += step
            saver.pause(backend)
            assert saver.get_cpu_backup(tensor, zero_copy=True).data_ptr() == pointer
        saver.resume(backend)
        assert saver.get_cpu_backup(tensor) is None
        assert sum_of(tensor) == int((expected + 2).sum())


def case_mmap_backups_leave_the_host() -> None:
    """A pause increases host memory use by the tensor's size; the resume releases this memory."""

    def resident() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * KIB for line in status if line.startswith("VmRSS:"))

    with saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"):
        tensor = torch.full((2 * GIB,), 7, dtype=torch.uint8, device="cuda")
    saver.pause(), saver.resume()  # makes the permanent host allocations
    before = resident()
    saver.pause()
    paused = resident()
    saver.resume()
    assert paused - before >= 1.75 * GIB and paused - resident() >= 1.75 * GIB
    assert int(tensor[-1]) == 7
