"""Tests the addresses and memory of blocks against a model, and the bounds of heap.h."""

import random
import time
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C

MIB = 1 << 20
PAGE = 2 * MIB
SLAB = 64 * MIB  # the default of slab_bytes
LARGE = SLAB // 4  # the smallest block with its own memory

# Sizes around every relevant boundary: a block's unit, a page, a slab, a copy chunk of the backup.
EDGES = [512, PAGE, 4 * MIB, LARGE, SLAB, 128 * MIB, 300 * MIB]
sizes = st.one_of(
    st.integers(1, 5000),
    st.integers(1, 6 * MIB),
    st.integers(1, 300 * MIB),
    st.sampled_from(EDGES).flatmap(lambda n: st.integers(n - 513, n + 513)),
).filter(lambda n: 0 < n <= 300 * MIB)


def block_bytes(nbytes):
    """Return an allocation's bytes in units of 512 bytes, or in whole pages from one page up."""
    rounded = -(-nbytes // 512) * 512
    return rounded if rounded < PAGE else -(-rounded // PAGE) * PAGE


def held(name):
    return sum(row.resident_bytes for row in memsaver.stats()[name])


def pages_under(blocks):
    """Return the total size of all pages that contain any of the blocks."""
    pages = set()
    for address, nbytes in blocks:
        pages.update(range(address // PAGE, -(-(address + nbytes) // PAGE)))
    return len(pages) * PAGE


class HeapModel(RuleBasedStateMachine):
    """Compares a tag with a model, which is a dict of live blocks and the bytes written at their
    ends."""

    def __init__(self, sim, name, slab):
        super().__init__()
        self.sim, self.name, self.slab = sim, name, slab
        self.live = {}  # address -> (size, first bytes, last bytes)
        self.alone = set()  # addresses of blocks in extents of their own
        self.paused = False
        self.random = random.Random(1)
        self.others = sim.physical()

    @initialize(backup=st.sampled_from(["host", "none"]))
    def enter(self, backup):
        self.backup = backup
        with memsaver.region(self.name, backup=backup):
            pass

    def block_sizes(self):
        return [block_bytes(size) for size, *_ in self.live.values()]

    def live_bytes(self):
        return sum(size for size, *_ in self.live.values())

    def ends(self, address, size):
        length = min(size, 64)
        return address, address + size - length, length

    def write(self, address, size):
        low, high, length = self.ends(address, size)
        first, last = self.random.randbytes(length), self.random.randbytes(length)
        self.sim.write(low, first)
        self.sim.write(high, last)
        self.live[address] = (size, self.sim.read(low, length), last)

    @precondition(lambda self: not self.paused and self.live_bytes() < 400 * MIB)
    @rule(nbytes=sizes, count=st.integers(1, 6))
    def allocate(self, nbytes, count):
        with memsaver.region(self.name):
            for _ in range(count if nbytes < LARGE else 1):
                before = self.resident()
                address = _C.malloc(nbytes)
                assert address % 512 == 0 and (nbytes <= PAGE - 512 or address % PAGE == 0)
                self.write(address, nbytes)
                grown = self.resident() - before
                mine = [(address, block_bytes(nbytes))]
                if block_bytes(nbytes) >= max(PAGE, self.slab // 4):
                    # Exactly its own memory, or free memory that is mapped.
                    assert grown in (0, block_bytes(nbytes))
                    if grown:
                        self.alone.add(address)
                else:  # its pages, or an extent of a sixteenth of the small blocks, within bounds
                    small = sum(size for size in self.block_sizes() if size < self.slab // 4)
                    generous = max(PAGE, min(small // 16, self.slab))
                    assert 0 <= grown <= pages_under(mine) + generous

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        count = data.draw(st.integers(1, min(4, len(self.live))))
        for _ in range(count):
            address = data.draw(st.sampled_from(sorted(self.live)))
            size, *_ = self.live.pop(address)
            before = self.resident()
            _C.free(address)
            given_back = before - self.resident()
            assert given_back >= 0
            if address in self.alone and not self.paused:
                assert given_back == block_bytes(size)
            self.alone.discard(address)

    @precondition(lambda self: not self.paused)
    @rule()
    def pause(self):
        self.check_statistics()
        memsaver.pause(self.name)
        self.paused = True
        self.check_statistics()

    @precondition(lambda self: self.paused)
    @rule()
    def resume(self):
        memsaver.resume(self.name)
        self.paused = False
        self.check_statistics()
        self.alone.clear()  # after a resume, adjacent blocks share memory
        assert self.resident() == pages_under(self.blocks())  # only live blocks
        if self.backup == "none":
            for address, (size, *_) in list(self.live.items()):
                low, high, length = self.ends(address, size)
                assert self.sim.read(low, length) == self.sim.read(high, length) == bytes(length)
                self.write(address, size)

    def blocks(self):
        return [(address, block_bytes(size)) for address, (size, *_) in self.live.items()]

    def resident(self):
        """Return the driver's count, which `check_statistics` compares with the statistics."""
        return self.sim.physical() - self.others

    def check_statistics(self):
        assert self.resident() == held(self.name)

    @invariant()
    def ranges_are_the_live_blocks_and_do_not_overlap(self):
        if not hasattr(self, "backup"):
            return
        assert sorted(memsaver.ranges(self.name)) == sorted(self.blocks())
        ordered = sorted(self.blocks())
        for (start, nbytes), (following, _) in pairwise(ordered):
            assert start + nbytes <= following

    @invariant()
    def contents_are_there_when_mapped(self):
        for address, (size, first, last) in self.live.items():
            low, high, length = self.ends(address, size)
            if self.paused:
                assert not self.sim.accessible(low) and not self.sim.accessible(high)
            else:
                assert self.sim.read(low, length) == first
                assert self.sim.read(high, length) == last

    @invariant()
    def resident_bytes_are_bounded(self):
        # The lower bound is the pages of the blocks; the steps that allocate check the upper bound.
        if not hasattr(self, "backup"):
            return
        if self.paused or not self.live:
            assert self.resident() == 0
        else:
            assert self.resident() >= pages_under(self.blocks())

    def teardown(self):
        for address in self.live:
            _C.free(address)
        if hasattr(self, "backup"):
            assert self.resident() == 0
            if self.paused:
                memsaver.resume(self.name)
            memsaver.trim(wait=True)
            assert self.resident() == 0 and memsaver.ranges(self.name) == ()


@pytest.mark.parametrize(
    "slab",
    [
        pytest.param(SLAB, id="default"),
        pytest.param(PAGE, id="small slabs", marks=pytest.mark.long),
    ],
)
def test_allocations_against_a_model(sim, tag, options, slab):
    options(slab_bytes=slab)
    run_state_machine_as_test(
        lambda: HeapModel(sim, tag(), slab),
        settings=settings(
            max_examples=20,
            stateful_step_count=30,
            deadline=None,
            print_blob=True,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# --- releases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [LARGE, LARGE + 1, SLAB, 100 * MIB, (3 << 30) + 5])
def test_a_large_block_is_released_at_once(sim, tag, make_blocks, nbytes):
    name = tag()
    small = make_blocks(name, [512, PAGE, 5 * MIB])
    with memsaver.region(name):
        before = held(name), sim.physical()
        address = _C.malloc(nbytes)
        neighbour = simulator.buffer(3 * MIB)
        rounded = -(-nbytes // PAGE) * PAGE
        assert held(name) >= before[0] + rounded
        with_it = held(name), sim.physical()
        _C.free(address)
    assert held(name) == with_it[0] - rounded
    assert sim.physical() == with_it[1] - rounded
    sim.write(neighbour.address, b"x")
    assert all(b.is_intact() for b in small)


def test_large_blocks_reuse_freed_memory_after_a_resume(sim, tag):
    """A resume maps adjacent blocks as one piece, which remains if only some of them are freed."""
    name = tag()
    with memsaver.region(name):
        blocks = [simulator.buffer(LARGE + PAGE) for _ in range(12)]
    memsaver.pause(name)
    memsaver.resume(name)
    before = held(name), sim.physical()
    assert before[0] == 12 * (LARGE + PAGE)
    del blocks[::2]
    for number, block in enumerate(blocks):
        sim.write(block.address, bytes([number]) * LARGE)
    with memsaver.region(name):
        blocks += [simulator.buffer(LARGE + PAGE) for _ in range(6)]
    assert (held(name), sim.physical()) == before
    assert len({block.address for block in blocks}) == 12
    for number, block in enumerate(blocks[:6]):
        assert sim.read(block.address, LARGE) == bytes([number]) * LARGE


def test_the_first_small_block_takes_one_page(sim, tag):
    name = tag()
    with memsaver.region(name):
        block = simulator.buffer(1)
    assert held(name) == PAGE
    del block
    assert held(name) == 0


def test_freed_addresses_are_used_again(sim, tag):
    name = tag()
    with memsaver.region(name):
        reserved = None
        for _ in range(300):
            block = simulator.buffer(300 * MIB)
            reserved = reserved or sim.counts().reserved_bytes
            del block
    assert sim.counts().reserved_bytes == reserved
    assert held(name) == 0


def test_a_heap_outgrows_its_span(sim, tag):
    # Mostly reserved addresses: most of the memory is never accessed.
    name = tag()
    with memsaver.region(name, backup="none"):
        blocks = [_C.malloc(9 << 30) for _ in range(8)]
    for address in blocks:
        sim.write(address, b"first")
        sim.write(address + (9 << 30) - 4, b"last")
    assert held(name) == 72 << 30
    memsaver.pause(name)
    assert held(name) == 0
    memsaver.resume(name)
    assert all(sim.read(address, 5) == bytes(5) for address in blocks)
    for address in blocks:
        _C.free(address)
    assert held(name) == 0


# --- many blocks ----------------------------------------------------------------------------------


def test_ten_thousand_blocks_lie_on_few_pieces(sim, tag):
    name = tag()
    before = sim.counts().handles
    start = time.perf_counter()
    with memsaver.region(name, backup="none"):
        blocks = [_C.malloc(PAGE) for _ in range(10_000)]
    assert held(name) >= 10_000 * PAGE
    assert held(name) <= 10_000 * PAGE + SLAB
    assert sim.counts().handles - before < 600
    memsaver.pause(name)
    assert sim.counts().handles == before
    memsaver.resume(name)
    assert sim.counts().handles - before < 60
    assert held(name) == 10_000 * PAGE
    for address in blocks[::97]:
        sim.write(address, b"x")
    for address in blocks:
        _C.free(address)
    assert held(name) == 0 and sim.counts().handles == before
    assert time.perf_counter() - start < 30


def test_ten_thousand_holes_do_not_slow_down_large_allocations(sim, tag, options):
    options(slab_bytes=4 * PAGE)
    name = tag()

    def allocate(count):
        start = time.perf_counter()
        with memsaver.region(name, backup="none"):
            blocks = [_C.malloc(PAGE) for _ in range(count)]
        return blocks, time.perf_counter() - start

    blocks, at_first = allocate(20_000)
    for address in blocks[::2]:
        _C.free(address)
    assert held(name) == 10_000 * PAGE
    again, later = allocate(5_000)
    assert held(name) == 15_000 * PAGE
    assert later < 5 * at_first  # the search of all holes takes 50 times as long
    for address in blocks[1::2] + again:
        _C.free(address)


def test_pieces_of_a_shareable_tag_grow_with_all_its_memory(sim, tag):
    name = tag()
    before = sim.counts().handles
    with memsaver.region(name, backup="none", shareable=True):
        large = [simulator.buffer(1200 * MIB) for _ in range(16)]
        assert sim.counts().handles - before == len(large)
        small = [simulator.buffer(20 * MIB) for _ in range(200)]
    assert sim.counts().handles - before <= len(large) + 8
    assert held(name) >= sum(block.nbytes for block in large + small)


@pytest.mark.parametrize("order", ["forward", "backward", "shuffled"])
def test_a_hundred_thousand_small_blocks(sim, tag, order):
    name = tag()
    rng = random.Random(7)
    start = time.perf_counter()
    with memsaver.region(name, backup="none"):
        blocks = [_C.malloc(rng.choice([1, 512, 513, 4096, 20_000])) for _ in range(100_000)]
    assert len(set(blocks)) == 100_000
    allocated = sum(row.allocated_bytes for row in memsaver.stats()[name])
    assert held(name) <= allocated * 17 // 16 + PAGE
    memsaver.pause(name)
    memsaver.resume(name)
    assert held(name) <= allocated + PAGE
    if order == "backward":
        blocks.reverse()
    elif order == "shuffled":
        rng.shuffle(blocks)
    for address in blocks:
        _C.free(address)
    assert held(name) == 0 and memsaver.ranges(name) == ()
    assert time.perf_counter() - start < 30


def test_an_allocation_leaves_the_margin_free(sim, tag, options):
    """An allocation fails if it would use the margin; cached free memory can be used."""
    name = tag()
    free = memsaver.device_memory(0)[0]
    options(margin_bytes=free - 8 * MIB)
    with memsaver.region(name):
        with pytest.raises(memsaver.OutOfDeviceMemoryError, match="margin_bytes") as caught:
            simulator.buffer(10 * MIB)
        assert (caught.value.needed, caught.value.free) == (10 * MIB, free)
        kept = [simulator.buffer(nbytes) for nbytes in (4 * MIB, 2 * MIB, MIB, MIB // 2)]
        with pytest.raises(memsaver.OutOfDeviceMemoryError):
            simulator.buffer(2 * MIB)
        options(margin_bytes=0)
        kept.append(simulator.buffer(10 * MIB))
        options(margin_bytes="80GiB")
    memsaver.pause(name)
    memsaver.resume(name)  # the margin applies only to allocations
    assert memsaver.stats()[name][0].resident_bytes == 18 * MIB
