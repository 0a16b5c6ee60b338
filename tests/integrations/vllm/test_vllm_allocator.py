"""Tests memsaver's allocator for vLLM: its pools, sleep and wake-up."""

import sys
from collections import namedtuple
from types import ModuleType

import pytest
from simulated_driver import Block

import memsaver
from memsaver._runtime.native import policy_of
from memsaver.integrations.vllm.allocator import MemsaverAllocator

MIB = 1 << 20


@pytest.fixture
def allocator(sim, tag):
    """Create an allocator with tags that belong to this test."""
    tag.names.extend(("weights", "kv_cache", "runtime", "default", "adapters", "cuda_graph"))
    return MemsaverAllocator()


def pool(allocator, sim, tag, nbytes=4 * MIB, seed=1):
    """Allocate a block in one of the allocator's pools."""
    with allocator.use_memory_pool(tag):
        return Block(sim, nbytes, seed)


POOLS = {"default": None, "cuda_graph": "cudagraph"}  # by tag, vLLM's name if it differs


@pytest.mark.parametrize(
    ("offloaded", "kept", "lost"),
    [
        (("weights",), ["weights", "runtime"], ["kv_cache"]),
        ("kv_cache", ["kv_cache"], ["weights"]),
        (None, ["default"], ["adapters"]),
        ("default", ["default"], ["adapters"]),
        ((), ["cuda_graph", "runtime"], ["weights", "default", "adapters"]),
    ],
)
def test_a_sleep_keeps_the_named_tags_and_discards_the_others(
    sim, allocator, offloaded, kept, lost
):
    blocks = {tag: pool(allocator, sim, POOLS.get(tag, tag)) for tag in (*kept, *lost)}
    allocator.sleep(offloaded)
    assert set(allocator.released) == set(blocks)
    assert not any(sim.accessible(block.address) for block in blocks.values())
    saved = {row.tag for row in memsaver.stats().tags if row.backup_bytes}
    assert saved.intersection(blocks) == set(kept)
    allocator.wake_up()
    assert allocator.released == ()
    assert all(blocks[tag].is_intact() for tag in kept)
    assert all(blocks[tag].is_zero() for tag in lost)


@pytest.mark.parametrize("place", ["host", "pageable", "disk", "peer"])
def test_a_variable_chooses_the_place_of_backups(
    sim, allocator, options, monkeypatch, tmp_path, place
):
    options(disk_dir=str(tmp_path))
    monkeypatch.setenv("MEMSAVER_VLLM_BACKUP", place)
    weights, cache = pool(allocator, sim, "weights"), pool(allocator, sim, "kv_cache")
    allocator.sleep(("weights",))
    [row] = memsaver.stats()["weights"]
    assert policy_of("weights") == place
    assert (row.disk_bytes > 0, row.host_bytes > 0) == (place == "disk", place != "disk")
    allocator.wake_up()
    assert weights.is_intact() and cache.is_zero()


def test_a_sleep_may_be_restricted_to_some_tags(sim, allocator):
    weights, cache = pool(allocator, sim, "weights"), pool(allocator, sim, "kv_cache")
    with allocator.only(["kv_cache"]):
        allocator.sleep(offload_tags=("weights",))
    assert allocator.released == ("kv_cache",) and weights.is_intact()
    assert allocator.discards("kv_cache") and not allocator.discards("weights")
    allocator.sleep(offload_tags=("weights",))
    assert set(allocator.released) == {"weights", "kv_cache"}
    allocator.wake_up()
    assert weights.is_intact() and cache.is_zero()


def test_a_partial_wake_up_defers_weights_and_kv_cache_only(sim, allocator):
    others = "runtime", "default"
    blocks = {tag: pool(allocator, sim, tag) for tag in ("weights", "kv_cache", *others)}
    allocator.sleep(offload_tags=("weights", *others))
    allocator.wake_up(["kv_cache"])
    assert allocator.released == ("weights",)
    assert all(blocks[tag].is_intact() for tag in others)
    allocator.wake_up(["weights"])
    assert blocks["weights"].is_intact()


def test_a_released_tag_keeps_the_policy_of_its_release(sim, allocator):
    weights, cache = pool(allocator, sim, "weights"), pool(allocator, sim, "kv_cache")
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up(["kv_cache"])
    allocator.sleep(offload_tags=())
    allocator.discard(("weights", "kv_cache"))
    allocator.wake_up()
    assert weights.is_intact() and cache.is_zero()


def test_discard_releases_only_the_named_tags(sim, allocator):
    weights, cache = pool(allocator, sim, "weights"), pool(allocator, sim, "kv_cache")
    allocator.discard("kv_cache")
    assert allocator.released == ("kv_cache",) and sim.accessible(weights.address)
    allocator.discard(("unknown",))
    allocator.wake_up()
    assert cache.is_zero() and weights.is_intact()


def test_a_sleep_without_host_memory_releases_no_tag(sim, allocator):
    weights, cache = pool(allocator, sim, "weights"), pool(allocator, sim, "kv_cache")
    sim.host_limit(1 << 16)
    with pytest.raises(memsaver.OutOfHostMemoryError):
        allocator.sleep(offload_tags=("weights",))
    assert allocator.released == ()
    assert weights.is_intact() and cache.is_intact()


def test_unchanged_weights_are_not_copied_again(sim, allocator):
    block = pool(allocator, sim, "weights")
    for _ in range(2):
        allocator.sleep(offload_tags=("weights",))
        allocator.wake_up()
    (row,) = (row for row in memsaver.stats().tags if row.tag == "weights")
    assert row.last_saved_bytes == 0 and row.last_unchanged_bytes >= block.nbytes
    assert block.is_intact()


def test_pools_may_be_nested(sim, allocator):
    with allocator.use_memory_pool("runtime"):
        first = Block(sim, MIB, 1)
        with allocator.use_memory_pool("kv_cache"):
            cache = Block(sim, MIB, 2)
        second = Block(sim, MIB, 3)
    allocator.discard("kv_cache")
    assert not sim.accessible(cache.address)
    assert first.is_intact() and second.is_intact()
    allocator.wake_up()


def test_an_exception_in_a_pool_leaves_the_pool(sim, allocator):
    with pytest.raises(ValueError, match="in the pool"), allocator.use_memory_pool("weights"):
        block = Block(sim, MIB, 1)
        raise ValueError("in the pool")
    with pytest.raises(memsaver.InvalidStateError):  # no pool is open
        memsaver.simulator.buffer(MIB)
    allocator.sleep(offload_tags=("weights",))
    allocator.wake_up()
    assert block.is_intact()


def test_a_failed_allocation_in_a_pool_leaves_no_error(sim, allocator):
    _, total = memsaver.device_memory(0)
    with allocator.use_memory_pool("weights"), pytest.raises(memsaver.OutOfDeviceMemoryError):
        Block(sim, total + MIB, 1)
    block = pool(allocator, sim, "weights")
    assert block.is_intact() and allocator.get_current_usage() == block.nbytes


def test_memory_may_be_freed_while_it_is_released(sim, allocator):
    block, kept = pool(allocator, sim, "weights"), pool(allocator, sim, "weights", seed=2)
    allocator.sleep(offload_tags=("weights",))
    del block
    allocator.wake_up()
    assert kept.is_intact()
    assert allocator.get_current_usage() == kept.nbytes


def test_live_allocations_are_listed_as_by_vllm(sim, allocator, monkeypatch):
    block = pool(allocator, sim, "weights")
    module = ModuleType("vllm.device_allocator")
    module.AllocationData = namedtuple("AllocationData", "handle tag")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ((address, data),) = allocator.pointer_to_data.items()
    assert (address, data.handle[1], data.tag) == (block.address, block.nbytes, "weights")


def test_usage_counts_released_memory_and_ends_with_it(sim, allocator):
    assert allocator.get_current_usage() == 0
    block = pool(allocator, sim, "weights")
    allocator.sleep(offload_tags=())
    assert allocator.get_current_usage() == block.nbytes
    del block
    assert allocator.get_current_usage() == 0


def test_a_pool_of_a_released_tag_is_refused_unless_its_memory_was_freed(sim, allocator):
    block = pool(allocator, sim, "weights")
    allocator.sleep(offload_tags=())
    with pytest.raises(memsaver.InvalidStateError, match="weights"):
        pool(allocator, sim, "weights")
    del block
    assert pool(allocator, sim, "weights").is_intact()


def test_a_graph_pool_needs_a_gpu(allocator):
    with pytest.raises(memsaver.NotLoadedError), allocator.cudagraph_pool():
        pass
