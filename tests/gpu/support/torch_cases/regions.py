"""Tests which tensors and threads a region affects, and which operations an open region
prevents.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from expected_errors import raises

import memsaver
from torch_cases.tensors import MIB, held, inside, is_numbered, numbered


def case_nesting_and_disabled(tag: str) -> None:
    """The innermost region or disabled() block determines a tensor's tag."""
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
    """Four threads can have open regions concurrently, for one tag and for different tags."""
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
    """A tag cannot be paused while any thread has an open region of the tag."""
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
        assert memsaver.state(tag) == "mapped"
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
    """paused() resumes only the tags that it has paused, even after an exception."""
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
    assert memsaver.state(first) == "paused"  # paused before the block
    memsaver.resume(first)
    assert is_numbered(one)
    assert not two.any()  # this pause discarded it
    assert memsaver.pause(second).changed == (second,)
    assert memsaver.pause(second).changed == ()
    assert memsaver.resume(second).changed == (second,)
    assert memsaver.resume(second).changed == ()


def case_explain(tag: str) -> None:
    """`explain` distinguishes torch's tensors within an allocation, including deleted tensors."""
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


def case_a_region_of_sglang_does_not_start_cublas(tag: str) -> None:
    """SGLang derives the size of its KV cache from the free memory after loading the weights."""
    from memsaver.integrations.sglang.adapter import MemsaverAdapter

    torch.zeros(1, device="cuda")
    free = torch.cuda.mem_get_info()[0]
    with MemsaverAdapter().region(tag):
        assert torch.cuda.mem_get_info()[0] == free
        weights = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.mem_get_info()[0] >= free - (66 << 20)
    with memsaver.paused(tag, backup="host"):
        pass
    assert weights.sum() == 64 << 20


def case_matrix_product_inside_a_region(tag: str) -> None:
    """cuBLAS's workspace must not belong to the tag of the region in which cuBLAS was first
    used.
    """
    torch._C._cuda_clearCublasWorkspaces()
    left, right = torch.randn(64, 16384, device="cuda"), torch.randn(16384, 64, device="cuda")
    with memsaver.region(tag):
        inner = left @ right
    with memsaver.paused(tag, backup="host"):
        outer = left @ right
        torch.cuda.synchronize()
    for product in (inner, outer):
        assert torch.allclose(product, left @ right, rtol=1e-2, atol=1e-1)
