"""Tests a tag's torch pools: their allocator functions and lifetime (with a fake torch)."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import memsaver
from memsaver._memory import mempools, torch_mode
from memsaver._runtime.native import _C

pytestmark = pytest.mark.each_python

MIB = 1 << 20
MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


# --- allocator functions --------------------------------------------------------------------------


@pytest.fixture
def functions(sim):
    """Return a function that returns a tag's malloc and free functions for torch as ctypes
    callables.
    """

    def of(tag: str, backup: int = -1):
        malloc, free = _C.torch_allocator(tag, backup)
        return MALLOC(malloc), FREE(free)

    return of


def held(tag: str) -> int:
    return sum(row.allocated_bytes for row in memsaver.stats()[tag])


def test_memory_belongs_to_the_functions_tag(sim, tag, functions):
    name, around = tag("pool"), tag("around")
    malloc, free = functions(name, 1)
    assert memsaver.stats()[name][0].backup == "host"
    made = [malloc(MIB, 0, None)]
    with memsaver.region(around):
        made.append(malloc(MIB, 0, None))
        with memsaver.disabled():
            made.append(malloc(MIB, 0, None))
        assert _C.region_tag() == around
    thread = threading.Thread(target=lambda: made.append(malloc(MIB, 0, None)))
    thread.start()
    thread.join()
    assert [memsaver.explain(address).tag for address in made] == [name] * 4
    sim.write(made[0], b"kept")
    memsaver.pause(name)
    assert held(around) == 0
    memsaver.resume(name)
    assert sim.read(made[0], 4) == b"kept"
    for address in made:
        free(address, MIB, 0, None)
    assert held(name) == 0
    assert malloc(0, 0, None) is None


def test_each_tag_has_its_own_function_and_the_same_each_time(tag, functions):
    one, two = tag("one"), tag("two")
    assert _C.torch_allocator(one, -1) == _C.torch_allocator(one, -1)
    assert _C.torch_allocator(one, -1)[0] != _C.torch_allocator(two, -1)[0]


def test_nothing_is_allocated_while_the_tag_is_paused(sim, tag, functions):
    name = tag()
    malloc, free = functions(name)
    first = malloc(MIB, 0, None)
    memsaver.pause(name)
    assert malloc(MIB, 0, None) is None
    with pytest.raises(memsaver.InvalidStateError):
        _C.torch_allocator(name, -1)
    with pytest.warns(memsaver.MemsaverWarning, match="while the tag is paused"):
        memsaver.resume(name)
    second = malloc(MIB, 0, None)
    assert second
    free(first, MIB, 0, None)
    free(second, MIB, 0, None)


def test_no_memory_is_null_and_a_warning(sim, tag, functions):
    malloc, _ = functions(tag())
    with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY, times=0):
        assert malloc(MIB, 0, None) is None
    with pytest.warns(memsaver.MemsaverWarning, match="needs 2 MiB"):
        memsaver.trim(wait=True)


def test_the_number_of_tags_with_pools_is_limited():
    program = """
from memsaver._runtime.native import _C
import memsaver
functions = {_C.torch_allocator(f"tag {number}", -1)[0] for number in range(256)}
assert len(functions) == 256
try:
    _C.torch_allocator("one more", -1)
except memsaver.InvalidStateError as error:
    assert "256" in str(error)
else:
    raise AssertionError
assert _C.torch_allocator("tag 255", -1)[0] in functions
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)


@pytest.mark.parametrize("wrong", ["", "a\0b", 3])
def test_invalid_tags_have_no_pool(sim, wrong):
    with pytest.raises(memsaver.ConfigError):
        memsaver.torch_pool(wrong)


def test_the_simulator_has_no_torch_pools(sim, tag):
    with pytest.raises(memsaver.NotLoadedError, match="GPU"):
        memsaver.torch_pool(tag())
    with pytest.raises(memsaver.ConfigError, match="backup"):
        memsaver.torch_pool(tag(), backup="moon")
    with pytest.raises(memsaver.ConfigError, match="one device"):
        memsaver.torch_pool(tag(), device=[0, 1])


# --- pools, with a fake of torch's ----------------------------------------------------------------


class Allocator:
    """A fake of torch's caching allocator, which counts the users of pools and records pools in
    use.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[int, int], int] = {}
        self.inside: set[tuple[int, int]] = set()
        self.destroyed: list[tuple[int, int]] = []
        self.numbers = itertools.count(1)

    def release(self, device: int, pool: tuple[int, int]) -> None:
        assert self.counts[pool] > 0
        self.counts[pool] -= 1

    @contextlib.contextmanager
    def use(self, pool, device=None):
        self.counts[pool.id] += 1  # before the check, as in torch
        if pool.id in self.inside:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.inside.add(pool.id)
        try:
            yield
        finally:
            self.inside.remove(pool.id)
            self.release(0, pool.id)


@pytest.fixture
def allocator():
    return Allocator()


@pytest.fixture
def fake_torch(allocator, monkeypatch):
    class MemPool:
        def __init__(self, functions: tuple[int, int]) -> None:
            self.functions = functions
            self.id = (0, next(allocator.numbers))
            allocator.counts[self.id] = 1

        def use_count(self) -> int:
            return allocator.counts[self.id]

    cuda = SimpleNamespace(
        MemPool=MemPool,
        device=lambda device: contextlib.nullcontext(),
        stream=lambda stream: contextlib.nullcontext(),
        graph=lambda graph: SimpleNamespace(capture_stream=None),
        CUDAGraph=lambda: None,
        current_blas_handle=lambda: 0,
        use_mem_pool=allocator.use,
        current_device=lambda: 0,
        is_current_stream_capturing=lambda: False,
        memory_snapshot=lambda: [],
        memory=SimpleNamespace(
            CUDAPluggableAllocator=lambda *names: SimpleNamespace(allocator=lambda: None)
        ),
    )
    native = SimpleNamespace(
        _cuda_releasePool=allocator.release, _cuda_customAllocator=lambda *functions: functions
    )
    monkeypatch.setattr(torch_mode, "_closed_pools", {})
    monkeypatch.setattr(mempools, "_open", {})
    monkeypatch.setattr(mempools, "_allocators", {})
    monkeypatch.setattr(mempools, "_class", None)
    pools = torch_mode.TorchPools(SimpleNamespace(cuda=cuda, _C=native))
    monkeypatch.setattr(pools, "prepare", lambda device: [0], raising=False)
    for module in (mempools, torch_mode):
        monkeypatch.setattr(module, "torch_pools", lambda required=True: pools)
    return cuda


@pytest.fixture
def used(sim, tag, fake_torch):
    """Yield a tag that has memory in its own pool."""
    name = tag()
    pools = [memsaver.torch_pool(name, backup="host")]
    address = MALLOC(pools[0].functions[0])(MIB, 0, None)
    yield SimpleNamespace(name=name, pools=pools, address=address)
    FREE(_C.torch_allocator(name, -1)[1])(address, MIB, 0, None)


def test_it_is_torchs_own_class_with_the_tags_functions(used, fake_torch):
    (pool,) = used.pools
    assert isinstance(pool, fake_torch.MemPool)
    assert memsaver.explain(used.address).tag == used.name
    assert memsaver.stats()[used.name][0].backup == "host"
    assert memsaver.torch_pool(used.name).id != pool.id


def test_a_pool_that_nobody_keeps_is_closed_not_destroyed(used, allocator):
    (pool,) = used.pools
    name, reference = pool.id, id(pool)
    assert allocator.counts[name] == 1 and name not in torch_mode._closed_pools
    used.pools.clear()
    del pool
    gc.collect()
    assert allocator.counts[name] == 0
    assert id(torch_mode._closed_pools[name]) == reference  # the object still exists
    memsaver.pause(used.name)  # a closed pool has no users
    memsaver.resume(used.name)


def test_a_pool_in_a_cycle_is_closed_too(used, allocator):
    (pool,) = used.pools
    name = pool.id
    pool.itself = pool
    used.pools.clear()
    del pool
    gc.collect()
    assert allocator.counts[name] == 0 and name in torch_mode._closed_pools


def test_a_pause_while_it_is_in_use_is_refused(used, allocator, fake_torch, tag, make_blocks):
    (pool,) = used.pools
    other = tag("other")
    blocks = make_blocks(other, [MIB])
    with fake_torch.use_mem_pool(pool):
        count = allocator.counts[pool.id]
        for call in (
            lambda: memsaver.pause(used.name),
            lambda: memsaver.pause(),
            lambda: memsaver.swap(out=used.name, into=other),
        ):
            with pytest.raises(memsaver.InvalidStateError, match="in use") as caught:
                call()
            assert caught.value.tag == used.name
        assert allocator.counts[pool.id] == count
        assert memsaver.state(used.name) == "mapped"
        memsaver.pause(other)  # another tag is not affected
        memsaver.resume(other)
    memsaver.pause(used.name)
    memsaver.resume(used.name)
    assert allocator.counts[pool.id] == 1
    del blocks


def test_graphs_that_keep_it_do_not_hinder_a_pause(used, allocator):
    (pool,) = used.pools
    allocator.counts[pool.id] += 2
    memsaver.pause(used.name)
    memsaver.resume(used.name)
    assert allocator.counts[pool.id] == 3 and not allocator.inside
