"""The distribution that provides torch_memory_saver, with tensors and graphs of a real GPU.

Every test is a `case_*` function below, run by a child process of its own.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECONDS = 90  # for one case, the start of a child included

# How the child was started.
SETTINGS = ("plain", "torch", "expandable", "preload")


# --- helpers of the cases; they run in the child -------------------------------------------------

if __name__ == "__main__":
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    import memsaver


def free(device: int = 0) -> int:
    """Free bytes, as the driver says."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def numbers(count: int, offset: int = 0, device: str = "cuda") -> torch.Tensor:
    """`count` MiB of a pattern of their own."""
    return torch.arange(offset, offset + count * MIB // 4, dtype=torch.int32, device=device)


def sum_of(tensor: torch.Tensor) -> int:
    """The sum of all elements, which lies outside of any region."""
    return int(tensor.sum(dtype=torch.int64).item())


# --- cases ---------------------------------------------------------------------------------------


def case_cycles() -> None:
    """Weights with a backup, a cache without: paused and resumed apart, three times."""
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
    """Each tensor of a tag has the backup that its region asked for."""
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
    saver.resume()  # what the library keeps on a device, it has from here on
    before = free()
    saver.pause()
    # Pinning the backup anew takes a little device memory.
    assert free() - before >= 124 * MIB, (free() - before) / MIB
    saver.pause()
    saver.resume()
    saver.resume()
    assert [sum_of(tensor) for tensor in (kept, pageable, disk)] == sums
    assert not plain.any()


def case_graphs_of_one_pool() -> None:
    """As an engine captures them: many graphs, a pool of its own making, one tag, one stream."""
    source = torch.ones(16 * MIB, device="cuda")
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs, results = [], []
    before = free()
    for number in range(4):
        graphs.append(torch.cuda.CUDAGraph())
        with saver.cuda_graph(cuda_graph=graphs[-1], pool=pool, stream=stream, tag="cuda_graph"):
            results.append((source * (number + 1)).sum())
    taken = before - free()
    assert 64 * MIB <= taken < 3 * 64 * MIB  # shared
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
    """What a capture's memory holds comes back without a replay."""
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
    """The contents of a paused tensor, on the CPU; nothing while it is on the GPU."""
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
    found[0][0] = 5.0  # without a copy: comes back with the resume
    saver.resume("weights")
    assert bool((tensor[0] == 5.0).all()) and torch.equal(tensor[1:].cpu(), expected[0][1:])


def case_disable() -> None:
    """What is made under disable() stays where it is, and can be sent to another process."""
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
    """An allocation in a region leaves the margin free."""
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
    """A preloaded region is about every GPU in use; the other mode about the current one."""
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


def case_a_whole_trainer() -> None:
    """A process that is one region trains, is paused, and goes on as if nothing had been."""
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


# --- the examples of the original, by what they check -------------------------------------------


def used() -> int:
    """Bytes in use on the device, as the driver says, and nothing emptied for it."""
    torch.cuda.synchronize()
    available, total = torch.cuda.mem_get_info(0)
    return total - available


def forward(weights: list[torch.Tensor]) -> float:
    """A pass whose activations are larger than the weights."""
    ones = torch.ones(GIB, dtype=torch.float32, device="cuda")
    mean = torch.stack([weight.float().mean() for weight in weights]).mean()
    return float((ones * mean).mean().item())


def case_a_training_engine() -> None:
    """Paused, with work in a disabled block that leaves nothing, and resumed as it was."""
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
    """What lives on, what an exception leaves, and blocks inside of blocks and regions."""
    forward([torch.ones(MIB, device="cuda")])
    before = used()
    for is_warm in (False, True, True):  # the first time takes 64 MiB more of an H200
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
    """A region without a backup inside of a process that has one, and the state around it."""
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


def case_retained_backups() -> None:
    """Shown at one address from pause to pause, until a resume that does not retain them."""
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
            saver.retain_cpu_backup = False  # concerns the resumes that follow
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
    """Host memory grows by the tensor at the pause, and shrinks by it in the resume."""

    def resident() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * KIB for line in status if line.startswith("VmRSS:"))

    with saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"):
        tensor = torch.full((2 * GIB,), 7, dtype=torch.uint8, device="cuda")
    saver.pause(), saver.resume()  # what a first transition takes, it keeps
    before = resident()
    saver.pause()
    paused = resident()
    saver.resume()
    assert paused - before >= 1.75 * GIB and paused - resident() >= 1.75 * GIB
    assert int(tensor[-1]) == 7


def case_memory_by_ctypes() -> None:
    """Allocations of odd sizes, also freed while paused, in a program that knows the library."""
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


# --- the tests ------------------------------------------------------------------------------------

ANYWHERE = [
    case_cycles,
    case_regions_of_one_tag,
    case_graphs_of_one_pool,
    case_a_graph_with_a_backup,
    case_get_cpu_backup,
    case_disable,
    case_margin,
    case_retained_backups,
    case_mmap_backups_leave_the_host,
]
# Of a process that is one region, with a backup of all.
WHOLE_PROCESS = [
    case_a_training_engine,
    case_disabled_blocks,
    case_nested_regions,
    case_memory_by_ctypes,
]
OTHERS = [case_two_devices, case_a_whole_trainer]
BY_NAME = {case.__name__: case for case in (*ANYWHERE, *WHOLE_PROCESS, *OTHERS)}


def run_child(case: Any, setting: str, site: Path, **variables: str) -> None:
    """Runs a case in a child that was started like this, and fails as it failed."""
    program = [sys.executable, __file__, case.__name__, setting]
    if setting == "preload":
        start = "import subprocess, sys; from torch_memory_saver import configure_subprocess\n"
        start += "with configure_subprocess(): sys.exit(subprocess.run(sys.argv[1:]).returncode)"
        program = [sys.executable, "-c", start, *program]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MEMSAVER_", "TMS_", "PYTORCH_")) and name != "LD_PRELOAD"
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), env.get("PYTHONPATH")]))
    if setting == "expandable":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    done = subprocess.run(
        program, env={**env, **variables}, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", ANYWHERE, ids=lambda case: case.__name__.removeprefix("case_"))
def test_one_gpu(case: Any, setting: str, dropin_site: Path) -> None:
    run_child(case, setting, dropin_site)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("setting", ["plain", "torch", "preload"])
def test_two_gpus(setting: str, dropin_site: Path) -> None:
    run_child(case_two_devices, setting, dropin_site)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["configure_subprocess", "by hand"])
@pytest.mark.parametrize("segments", ["", "expandable_segments:True"])
def test_a_whole_process(how: str, segments: str, dropin_site: Path) -> None:
    variables = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    if segments:
        variables["PYTORCH_CUDA_ALLOC_CONF"] = segments
    setting = "preload"
    if how == "by hand":
        setting = "plain"
        library = "torch_memory_saver_hook_mode_preload.abi3.so"
        variables["LD_PRELOAD"] = str(dropin_site / library)
    run_child(case_a_whole_trainer, setting, dropin_site, **variables)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", WHOLE_PROCESS, ids=lambda case: case.__name__.removeprefix("case_")
)
def test_the_originals_examples_of_a_whole_process(case: Any, dropin_site: Path) -> None:
    variables = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    run_child(case, "preload", dropin_site, **variables)


if __name__ == "__main__":
    if sys.argv[2:] == ["torch"]:
        saver.hook_mode = "torch"
    BY_NAME[sys.argv[1]]()
