"""What torch mode promises, on a real GPU.

Every test is a `case_*` function below, run by a child process that the tests share and that is
replaced after a failure, which may have ended its CUDA context. Alone, without pytest:

    python tests/gpu/test_torch_mode.py case_backup_view [more cases]
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memsaver

MIB = 1 << 20
GIB = 1 << 30
NOISE = 4 * MIB  # the driver's own housekeeping between two readings
SECONDS = 90  # for one case, the start of a child included

SETTINGS = ("fixed", "expandable", "preload")


# --- helpers of the cases; they run in the child -------------------------------------------------

if __name__ == "__main__":
    import torch


def tidy() -> None:
    """Lets torch give back what no tensor uses."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def free(device: int = 0) -> int:
    """Free bytes, as the driver says."""
    tidy()
    return torch.cuda.mem_get_info(device)[0]


def held(tag: str) -> int:
    """Device memory of a tag, as memsaver says."""
    return sum(row.resident_bytes for row in memsaver.stats()[tag])


def allocated(tag: str) -> int:
    """Bytes of a tag's live allocations."""
    return sum(row.allocated_bytes for row in memsaver.stats()[tag])


def inside(tensor: torch.Tensor, tag: str) -> bool:
    """Whether a tensor's memory belongs to a tag."""
    start = tensor.data_ptr()
    return any(r.address <= start < r.address + r.bytes for r in memsaver.ranges(tag))


def numbered(count: int, number: int = 1, device: str = "cuda") -> torch.Tensor:
    """`count` MiB of a pattern of their own."""
    tensor = torch.arange(count * MIB // 4, dtype=torch.int32, device=device)
    return tensor.mul_(2 * number + 1)


def is_numbered(tensor: torch.Tensor, number: int = 1) -> bool:
    """Whether the pattern is still there."""
    count = tensor.numel() * 4 // MIB
    return torch.equal(tensor, numbered(count, number, str(tensor.device)))


@contextlib.contextmanager
def raises(kind: type[BaseException]) -> Iterator[list[Any]]:
    """The block must raise this; the error is then in the list."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def on_thread(function: Callable[[], object]) -> None:
    """Runs a function on another thread and waits for it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# --- cases ---------------------------------------------------------------------------------------


def case_deleted_tensors_go_back(tag: str) -> None:
    """To torch.cuda.empty_cache(), before and after a pause, while the tag lives on."""
    # Tensors of more than share_bytes have pieces of their own after a resume.
    with memsaver.region(tag, backup="host"):
        tensors = [numbered(768, number) for number in range(4)]
    before, held_before = free(), held(tag)
    assert held_before >= 4 * 768 * MIB
    del tensors[1]
    assert free() - before >= 768 * MIB - NOISE
    assert held_before - held(tag) >= 768 * MIB
    assert [is_numbered(t, n) for t, n in zip(tensors, (0, 2, 3), strict=True)] == [True] * 3

    memsaver.pause(tag)
    memsaver.resume(tag)
    before, held_before = free(), held(tag)
    del tensors[0]
    assert free() - before >= 768 * MIB - NOISE
    assert held_before - held(tag) == 768 * MIB
    assert [is_numbered(t, n) for t, n in zip(tensors, (2, 3), strict=True)] == [True] * 2

    tensors.clear()
    tidy()
    assert held(tag) == 0
    assert memsaver.stats()[tag][0].allocations == 0
    with memsaver.region(tag):
        again = numbered(8)
    assert inside(again, tag)
    assert memsaver.stats()[tag][0].backup == "host"  # the tag kept its policy
    memsaver.pause(tag)
    memsaver.resume(tag)
    assert is_numbered(again)


def case_small_tensors_go_back(tag: str) -> None:
    """Also after a resume, if share_bytes says that they share no pieces."""
    memsaver.configure(share_bytes="2MiB")
    try:
        with memsaver.region(tag, backup="host"):
            tensors: list[Any] = [numbered(32, number) for number in range(8)]
        memsaver.pause(tag)
        memsaver.resume(tag)
        before = held(tag)
        for number in (1, 4, 7):
            tensors[number] = None
        tidy()
        assert before - held(tag) == 3 * 32 * MIB
        assert all(is_numbered(t, n) for n, t in enumerate(tensors) if t is not None)
    finally:
        memsaver.configure(share_bytes="512MiB")


def case_dead_blocks_are_not_copied(tag: str) -> None:
    """The peak of loading, and tensors deleted since: neither saved nor restored."""
    with memsaver.region(tag, backup="host"):
        peak = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        tensors: list[Any] = [numbered(2, number) for number in range(40)]
        del peak
    for number in range(0, 40, 2):
        tensors[number] = None
    live = 20 * 2 * MIB
    # torch cuts its segments of 20 MiB into these tensors: every segment has live and dead blocks.
    assert allocated(tag) >= 2 * live
    report = memsaver.pause(tag)
    assert report.copied_bytes == live, (report.copied_bytes, live)
    assert report.bytes >= 2 * live
    rows = memsaver.stats()[tag]
    assert sum(row.backup_bytes for row in rows) == live
    report = memsaver.resume(tag)
    assert report.copied_bytes == live
    assert all(is_numbered(t, n) for n, t in enumerate(tensors) if t is not None)


def case_freed_on_another_thread(tag: str) -> None:
    """A tensor made on one thread and deleted on another is simply freed."""
    made: list[Any] = []

    def make() -> None:
        with memsaver.region(tag, backup="host"):
            made.extend(numbered(64, number) for number in range(3))

    on_thread(make)
    before = held(tag)
    on_thread(made.pop)
    tidy()
    assert before - held(tag) == 64 * MIB
    made.pop(0)
    tidy()
    assert before - held(tag) == 128 * MIB
    assert is_numbered(made[0], 1)


def case_freed_inside_another_region(tag: str) -> None:
    """Deleting under another tag, or under disabled(), concerns the tensor's own tag."""
    other = tag + ".other"
    with memsaver.region(tag):
        tensors = [numbered(64, number) for number in range(3)]
    with memsaver.region(other):
        kept = numbered(64, 9)
        tensors.pop()
    with memsaver.disabled():
        tensors.pop()
    tidy()
    assert allocated(tag) == 64 * MIB
    assert allocated(other) == 64 * MIB
    assert is_numbered(tensors[0], 0)
    assert is_numbered(kept, 9)


def case_freed_while_paused(tag: str) -> None:
    """A tensor deleted while its tag is paused does not come back with the others."""
    with memsaver.region(tag, backup="host"):
        tensors = [numbered(640, number) for number in range(3)]
    before = free()
    paused = memsaver.pause(tag)
    assert paused.bytes >= 3 * 640 * MIB
    tensors.pop(1)
    tidy()
    assert allocated(tag) == 2 * 640 * MIB
    on_thread(lambda: tensors.pop(0))
    tidy()
    assert allocated(tag) == 640 * MIB
    resumed = memsaver.resume(tag)
    assert resumed.bytes == 640 * MIB
    assert resumed.copied_bytes == 640 * MIB
    assert held(tag) == 640 * MIB
    assert is_numbered(tensors[0], 2)
    assert free() - before >= 2 * 640 * MIB - 64 * MIB  # pinned memory takes some on the device


def case_everything_freed_while_paused(tag: str) -> None:
    """A tag may lose all its tensors while it is paused, and is used again."""
    with memsaver.region(tag, backup="host"):
        tensor = numbered(64)
    memsaver.pause(tag)
    del tensor
    tidy()
    assert allocated(tag) == 0
    assert memsaver.resume(tag).bytes == 0
    with memsaver.region(tag):
        tensor = numbered(64, 5)
    assert is_numbered(tensor, 5)


def case_nesting_and_disabled(tag: str) -> None:
    """The innermost region counts, and disabled() counts as one."""
    outer, inner = tag + ".outer", tag + ".inner"

    @memsaver.region(inner)
    def decorated() -> Any:
        return numbered(4)

    plain_before = numbered(4)
    with memsaver.region(outer):
        first = numbered(4)
        with memsaver.region(inner):
            second = numbered(4)
            with memsaver.disabled():
                plain = numbered(4)
                with memsaver.region(outer):
                    third = numbered(4)
            fourth = numbered(4)
            with memsaver.region(inner):
                fifth = numbered(4)
        with contextlib.suppress(ZeroDivisionError):
            with memsaver.region(inner):
                raise ZeroDivisionError
        sixth = numbered(4)
        seventh = decorated()
    plain_after = numbered(4)
    for tensor in (first, third, sixth):
        assert inside(tensor, outer) and not inside(tensor, inner)
    for tensor in (second, fourth, fifth, seventh):
        assert inside(tensor, inner) and not inside(tensor, outer)
    for tensor in (plain_before, plain, plain_after):
        assert not inside(tensor, inner) and not inside(tensor, outer)
    with memsaver.paused(outer, inner):
        for tensor in (plain_before, plain, plain_after):
            assert is_numbered(tensor)


def case_regions_on_several_threads(tag: str) -> None:
    """Regions open at the same time on four threads, of one tag and of different ones."""
    count = 4
    together = threading.Barrier(count)
    tensors: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        with memsaver.region(tag + ".shared", backup="host"):
            together.wait(30)
            shared = [numbered(2, 10 * number + i) for i in range(10)]
            with memsaver.region(f"{tag}.{number}", backup="host"):
                together.wait(30)
                own = [numbered(2, 10 * number + i) for i in range(10)]
            together.wait(30)
        tensors[number] = shared + own
        torch.cuda.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(tensors) == list(range(count))
    tags = [tag + ".shared", *(f"{tag}.{number}" for number in range(count))]

    def intact(number: int) -> bool:
        return all(is_numbered(t, 10 * number + i % 10) for i, t in enumerate(tensors[number]))

    for number in range(count):
        assert all(inside(t, tags[0]) for t in tensors[number][:10])
        assert all(inside(t, tags[1 + number]) for t in tensors[number][10:])
        assert intact(number)
    report = memsaver.pause(*tags)
    assert report.changed == tuple(tags)
    assert report.copied_bytes == 2 * count * 10 * 2 * MIB
    memsaver.resume(*reversed(tags))
    assert all(intact(number) for number in range(count))


def case_pause_under_an_open_region(tag: str) -> None:
    """A tag cannot be paused while a region of it is open, on whichever thread."""
    entered, leave = threading.Event(), threading.Event()
    kept: list[Any] = []

    def work() -> None:
        with memsaver.region(tag):
            kept.append(numbered(4))
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(30)
    try:
        with raises(memsaver.InvalidStateError) as errors:
            memsaver.pause(tag)
        assert errors[0].tag == tag
        assert memsaver.state(tag) is memsaver.State.MAPPED
        assert is_numbered(kept[0])
    finally:
        leave.set()
        thread.join()
    memsaver.pause(tag)
    with raises(memsaver.InvalidStateError):
        with memsaver.region(tag):
            pass
    memsaver.resume(tag)


def case_paused(tag: str) -> None:
    """paused() resumes what it paused, after an exception too, and nothing else."""
    first, second = tag + ".first", tag + ".second"
    with memsaver.region(first, backup="host"):
        one = numbered(64)
    with memsaver.region(second, backup="host"):
        two = numbered(64)
    with memsaver.paused(first) as report:
        assert report.changed == (first,)
        assert memsaver.state(first) == "paused"
        assert memsaver.state(second) == "mapped"
        assert held(first) == 0
    assert memsaver.state(first) == "mapped"
    with raises(ZeroDivisionError):
        with memsaver.paused(first, second):
            raise ZeroDivisionError
    assert is_numbered(one)
    assert is_numbered(two)
    memsaver.pause(first)
    with memsaver.paused(first, second, backup="none") as report:
        assert report.changed == (second,)
    assert memsaver.state(first) == "paused"  # somebody else's pause
    memsaver.resume(first)
    assert is_numbered(one)
    assert not two.any()  # discarded by this one pause
    assert memsaver.pause(second).changed == (second,)
    assert memsaver.pause(second).changed == ()
    assert memsaver.resume(second).changed == (second,)
    assert memsaver.resume(second).changed == ()


def case_backup_view(tag: str) -> None:
    """The saved contents as a CPU tensor, whatever the tensor's layout and type."""
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
    memsaver.backup_view(whole, writable=True)[0] = 7.0  # what is written to it comes back
    memsaver.resume(tag)
    expected[0][0] = 7.0
    assert torch.equal(whole.cpu(), expected[0])
    assert torch.equal(half.cpu(), expected[4])
    memsaver.pause(tag, backup="none")
    with raises(memsaver.InvalidStateError):
        memsaver.backup_view(whole)
    memsaver.resume(tag)
    assert not whole.any()


def case_pause_inside_a_capture(tag: str) -> None:
    """Raises, and the capture survives it and replays."""
    with memsaver.region(tag, backup="host"):
        weight = numbered(4)
    source = torch.ones(1024, device="cuda")
    for scope in (torch.cuda.graph, memsaver.graph):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with scope(graph):
            doubled = source * 2
            with raises(memsaver.InvalidStateError):
                memsaver.pause(tag)
            with raises(memsaver.InvalidStateError):
                memsaver.pause()
            result = doubled + 1
        assert memsaver.state(tag) is memsaver.State.MAPPED
        for value in (3.0, 5.0):
            source.fill_(value)
            graph.replay()
            assert torch.all(result == 2 * value + 1)
        assert is_numbered(weight)
        memsaver.pause(tag)
        memsaver.resume(tag)
        assert is_numbered(weight)
        source.fill_(1.0)
        del graph, doubled, result
        tidy()


def case_resume_without_enough_memory(tag: str) -> None:
    """Says what is needed and free, changes nothing, and succeeds when there is enough."""
    size = 4 * GIB
    with memsaver.region(tag, backup="host"):
        first, second = numbered(2048, 1), numbered(2048, 2)
    memsaver.pause(tag)
    ballast = torch.empty(free() - 3 * GIB, dtype=torch.uint8, device="cuda")
    before = free()
    for _ in range(2):
        with raises(memsaver.OutOfDeviceMemoryError) as errors:
            memsaver.resume(tag)
        error = errors[0]
        assert error.needed >= size, error.needed
        assert error.free < size, error.free
        assert abs(error.free - before) <= 64 * MIB, (error.free, before)
        assert error.tag == tag and error.status == "OUT_OF_DEVICE_MEMORY"
        assert "CUDA out of memory" in str(error)
        assert memsaver.state(tag) is memsaver.State.PAUSED
        assert held(tag) == 0
        assert abs(free() - before) <= NOISE
    del ballast, errors, error
    tidy()
    memsaver.resume(tag)
    assert is_numbered(first, 1)
    assert is_numbered(second, 2)


def case_allocation_without_enough_memory(tag: str) -> None:
    """torch raises its own error, the region goes on working."""
    with memsaver.region(tag):
        with raises(torch.OutOfMemoryError):
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        tensor = numbered(4)
    assert inside(tensor, tag)
    assert allocated(tag) <= 20 * MIB
    with memsaver.paused(tag, backup="host"):
        pass
    assert is_numbered(tensor)


def case_poison(tag: str) -> None:
    """What has no backup comes back as NaN, what has one as it was; also by a swap."""
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


def case_explain(tag: str) -> None:
    """torch's tensors are told apart in an allocation, dead ones too."""
    with memsaver.region(tag):
        first, second = numbered(1), numbered(2)
    places = {"first": first.data_ptr(), "second": second.data_ptr()}
    memsaver.pause(tag)
    found = memsaver.explain(second[1000])
    assert (found.tag, found.state, found.device) == (tag, "paused", 0)
    assert found.tensor == (places["second"], 2 * MIB) and found.offset == 4000
    assert "in case_explain" in found.caller, found.caller
    del first
    found = memsaver.explain(places["first"])
    assert found.tag == tag and found.tensor is None
    assert "no live" in str(found)
    memsaver.resume(tag)
    assert memsaver.explain(second).state == "mapped"
    assert memsaver.explain(torch.zeros(8, device="cuda")).tag is None
    assert memsaver.explain(torch.zeros(8)).tag is None


def case_graph_is_paused_and_replayed(tag: str) -> None:
    """A graph's memory is in its tag, goes and comes back, and goes with the graph."""
    source = torch.ones(16 * MIB, device="cuda")
    (source * 2 + 1).sum()
    graph = torch.cuda.CUDAGraph()
    with memsaver.graph(graph, tag=tag):
        result = (source * 2 + 1).sqrt()
    graph.replay()
    expected = result.clone()
    assert inside(result, tag)
    address = result.data_ptr()
    before = free()
    assert held(tag) >= 64 * MIB
    for backup in ("none", "host"):
        report = memsaver.pause(tag, backup=backup)
        assert free() - before >= 0.98 * report.bytes - 16 * MIB
        assert memsaver.resume(tag).changed == (tag,)
        assert torch.equal(result, expected) == (backup == "host")
        graph.replay()
        assert torch.equal(result, expected)
        assert result.data_ptr() == address
    second = torch.cuda.CUDAGraph()
    with memsaver.graph(second, tag=tag, pool=graph.pool()):
        other = (source * 3).exp()
    second.replay()
    assert inside(other, tag)
    del graph, second, result, other
    tidy()
    assert allocated(tag) == 0
    assert held(tag) == 0


def case_graphs_share_a_pool_that_the_caller_made(tag: str) -> None:
    """Graphs captured with torch's own pool handle share memory, in the tag, while they live."""
    source = torch.ones(16 * MIB, device="cuda")
    for _ in range(2):  # the second time, all graphs of the first are gone
        handle, graphs, results, bytes_after = torch.cuda.graph_pool_handle(), [], [], []
        for number in range(3):
            graphs.append(torch.cuda.CUDAGraph())
            with memsaver.graph(graphs[-1], tag=tag, pool=handle):
                results.append((source * (number + 2)).sum())  # a temporary of 64 MiB
            bytes_after.append(held(tag))
        assert bytes_after[0] >= 64 * MIB
        assert bytes_after[-1] < 2 * 64 * MIB
        assert all(inside(result, tag) for result in results)
        before = free()
        report = memsaver.pause(tag)
        assert free() - before >= 0.98 * report.bytes - 16 * MIB
        memsaver.resume(tag)
        for number, graph in enumerate(graphs):
            graph.replay()
            assert results[number].item() == (number + 2) * 16 * MIB
        graphs.clear()
        results.clear()
        del graph
        tidy()
        assert allocated(tag) == 0
    again = torch.cuda.CUDAGraph()
    with memsaver.graph(again, tag=tag, pool=handle):  # its graphs are gone, it can be used
        result = source * 2
    assert inside(result, tag)
    del again, result
    tidy()
    assert held(tag) == 0


def case_backward_inside_a_graph(tag: str) -> None:
    """Memory that autograd's threads allocate during a capture belongs to the graph's tag."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)
    ).to("cuda")
    batch = torch.randn(256, 512, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd's thread gets its cuBLAS workspace here
        for _ in range(2):
            model(batch).square().mean().backward()
    stream.synchronize()
    parameters: list[Any] = list(model.parameters())
    expected = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with memsaver.graph(graph, tag=tag, stream=stream):
        loss = model(batch).square().mean()
        loss.backward()
    gradients = [parameter.grad for parameter in parameters]
    assert inside(loss, tag)
    assert all(inside(gradient, tag) for gradient in gradients), "gradients outside of the tag"

    def check() -> None:
        graph.replay()
        for gradient, wanted in zip(gradients, expected, strict=True):
            # The warm-up added two of them up.
            assert torch.allclose(2 * gradient, wanted, rtol=1e-3, atol=1e-6)

    check()
    exact = [gradient.clone() for gradient in gradients]
    for _ in range(2):
        memsaver.pause(tag)
        assert held(tag) == 0
        memsaver.resume(tag)
        check()
        for gradient, wanted in zip(gradients, exact, strict=True):
            assert torch.equal(gradient, wanted)


def case_work_in_flight_is_awaited(tag: str) -> None:
    """A pause waits for what was submitted before it, on every stream."""
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
    # The same without a backup, where nothing but the wait keeps the memory.
    torch.cuda._sleep(300_000_000)
    target.copy_(source)
    memsaver.pause(tag, backup="none")
    torch.cuda.synchronize()
    memsaver.resume(tag)
    assert not target.any()


def case_discarded_memory_reads_as_zero(tag: str) -> None:
    """After a pause without a backup, wherever in the tag, and addresses stay."""
    with memsaver.region(tag):
        tensors = [numbered(count, 3) for count in (1, 2, 3, 64, 1100)]
        tensors += [torch.ones(100, device="cuda") for _ in range(50)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for _ in range(2):
        report = memsaver.pause(tag)
        assert report.copied_bytes == 0
        # Memory with other contents is what the driver has to give next.
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


def case_matrix_product_inside_a_region(tag: str) -> None:
    """cuBLAS's workspace must not be in the tag of the region that used cuBLAS first."""
    torch._C._cuda_clearCublasWorkspaces()
    left, right = torch.randn(64, 16384, device="cuda"), torch.randn(16384, 64, device="cuda")
    with memsaver.region(tag):
        inner = left @ right
    with memsaver.paused(tag, backup="host"):
        outer = left @ right
        torch.cuda.synchronize()
    for product in (inner, outer):
        assert torch.allclose(product, left @ right, rtol=1e-2, atol=1e-1)


def case_two_graphs_in_two_tags(tag: str) -> None:
    """A graph replays while the tag of another graph is paused: they share no workspace."""
    torch._C._cuda_clearCublasWorkspaces()
    left, right = torch.randn(64, 16384, device="cuda"), torch.randn(16384, 64, device="cuda")
    torch.mm(left, right)
    graphs, results = [], []
    for number in range(2):
        graph = torch.cuda.CUDAGraph()
        with memsaver.graph(graph, tag=f"{tag}.{number}"):
            results.append(left @ right)
        graphs.append(graph)
    for graph in graphs:
        graph.replay()
    expected = results[1].clone()
    with memsaver.paused(f"{tag}.0"):
        results[1].zero_()
        graphs[1].replay()
        torch.cuda.synchronize()
    assert torch.equal(results[1], expected)


def case_two_gpus_region_names_both(tag: str) -> None:
    """One region for the tensors of two devices; they are paused and resumed together."""
    with memsaver.region(tag, backup="host", device=[0, 1]):
        here, there = numbered(64, 1, "cuda:0"), numbered(64, 2, "cuda:1")
    with memsaver.region(tag, device="cuda:1"):
        outside = numbered(8, 3, "cuda:0")
    assert inside(here, tag) and inside(there, tag)
    if memsaver.is_preloaded():  # cudaMalloc knows threads and tags, no choice of devices
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
    """Contiguous and strided copies: a memory copy, and a kernel on the source's device."""
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
    """Between memory of regions and plain memory of two devices, before and after a resume."""
    tensors: dict[tuple[str, str], Any] = {}
    for device in ("cuda:0", "cuda:1"):
        # On the first turn the other device has no context in this process yet.
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


CASES: dict[str, Callable[[str], None]] = {
    name: function for name, function in list(globals().items()) if name.startswith("case_")
}
ON_TWO_GPUS = [name for name in CASES if name.startswith("case_two_gpus_")]
ON_ONE_GPU = [name for name in CASES if name not in ON_TWO_GPUS]
WARNING = ("case_allocation_without_enough_memory",)  # their warnings are meant
FRESH = ("case_two_gpus_copies",)  # want a process in which nothing ran before


# --- the child -----------------------------------------------------------------------------------


def run_case(name: str) -> dict[str, Any]:
    """Runs one case; how it went, and whether the process can be used for another."""
    start = time.perf_counter()
    reply: dict[str, Any] = {"ok": True, "usable": True}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            CASES[name](name.removeprefix("case_"))
        ours = [str(w.message) for w in caught if issubclass(w.category, memsaver.MemsaverWarning)]
        assert not ours or name in WARNING, f"warnings: {ours}"
    except BaseException:
        reply = {"ok": False, "trace": traceback.format_exc(), "usable": False}
    try:
        tidy()
    except BaseException:
        reply.update(ok=False, usable=False)
        reply["trace"] = reply.get("trace", "") + traceback.format_exc()
    reply["seconds"] = round(time.perf_counter() - start, 2)
    return reply


def serve() -> None:
    """Runs the cases that its input names, a JSON line about each."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        replies.write(json.dumps(run_case(line.strip())) + "\n")
        replies.flush()


# --- the tests -----------------------------------------------------------------------------------


def environment(setting: str) -> dict[str, str]:
    """A child's environment: this one without settings of torch's allocator and ours."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MEMSAVER_")
        and name not in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    }
    root = str(Path(memsaver.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    env["PYTHONFAULTHANDLER"] = "1"
    if setting == "expandable":
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if setting == "preload":
        env.update(memsaver.preload_env(env=env))
    return env


class Child:
    """A process that runs cases; a new one after a case that failed."""

    def __init__(self, setting: str) -> None:
        self._env = environment(setting)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, name: str) -> None:
        """Runs a case; fails as it failed."""
        if name in FRESH:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--serve"],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        with contextlib.suppress(BrokenPipeError):
            stdin.write(name.encode() + b"\n")
            stdin.flush()
        if not select.select([stdout], [], [], SECONDS)[0]:
            self.close(kill=True)
            pytest.fail(f"{name} did not end in {SECONDS} s")
        line = stdout.readline()
        if not line:
            status = self._process.wait()
            self._process = None
            pytest.fail(f"the process ended in {name}, status {status}")
        reply = json.loads(line)
        if not reply["usable"]:
            self.close(kill=True)
        if not reply["ok"]:
            pytest.fail(reply["trace"], pytrace=False)

    def close(self, kill: bool = False) -> None:
        """Ends the process."""
        if self._process is None:
            return
        if kill:
            self._process.kill()
        self._process.communicate()
        self._process = None


@pytest.fixture(scope="module", params=SETTINGS)
def child(request: pytest.FixtureRequest) -> Iterator[Child]:
    process = Child(request.param)
    yield process
    process.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_ONE_GPU, ids=lambda name: name.removeprefix("case_"))
def test_one_gpu(child: Child, name: str) -> None:
    child.run(name)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("name", ON_TWO_GPUS, ids=lambda name: name.removeprefix("case_"))
def test_two_gpus(child: Child, name: str) -> None:
    child.run(name)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        failed = 0
        for chosen in sys.argv[1:] or ON_ONE_GPU:
            outcome = run_case(chosen)
            print(chosen, "ok" if outcome["ok"] else outcome["trace"], outcome["seconds"], "s")
            failed += not outcome["ok"]
            if not outcome["usable"]:
                break
        sys.exit(failed)
