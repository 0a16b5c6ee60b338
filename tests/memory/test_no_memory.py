"""Tests allocations with too little device or host memory, and sizes that exceed every device."""

from itertools import chain

import pytest
from driver_faults import PAGE, Fixed, fill_device, held, reported, states

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import (
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
)

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20
GIB = 1 << 30


# --- no memory ------------------------------------------------------------------------------------


def test_a_resume_without_memory_leaves_all_tags_paused(sim, tag, make_blocks):
    names = [tag("first"), tag("second")]
    other = tag("resident")
    parts = [make_blocks(name, [3 * MIB, 6 * MIB], backup="host") for name in names]
    blocks = Fixed(sim, chain.from_iterable(parts))
    needed = held(names)
    memsaver.pause(*names)
    rest = Fixed(sim, make_blocks(other, [8 * MIB]))
    for free in (0, PAGE, needed - PAGE):
        fill_device(sim, free)
        with pytest.raises(OutOfDeviceMemoryError, match="CUDA out of memory") as caught:
            memsaver.resume(*names)
        assert (caught.value.needed, caught.value.free) == (needed, free)
        assert caught.value.tag in names
        assert f"'{other}'"[:40] in str(caught.value) and "8 MiB" in str(caught.value)
        assert states(names) == {"paused"} and held(names) == 0
        assert blocks.are_gone()
        assert rest.are_intact()
    fill_device(sim, needed)
    memsaver.resume(*names)
    assert blocks.are_intact() and rest.are_intact()
    assert memsaver.device_memory(0)[0] == 0


def test_a_large_allocation_extends_mapped_memory_if_there_is_no_room_for_a_new_piece(
    sim, tag, make_blocks
):
    name = tag()
    kept = make_blocks(name, [24 * MIB] * 3, backup="host")
    memsaver.pause(name)
    memsaver.resume(name)  # maps all blocks as one piece
    before = held([name])
    kept.pop()
    fill_device(sim, 18 * MIB)
    kept += make_blocks(name, [40 * MIB])
    assert held([name]) == before + 16 * MIB
    assert all(block.is_intact() for block in kept)


def test_an_allocation_without_memory_changes_nothing(sim, tag, make_blocks):
    name, other = tag(), tag("resident")
    rest = Fixed(sim, make_blocks(other, [8 * MIB], backup="host"))
    kept = Fixed(sim, make_blocks(name, [PAGE]))
    for free in (0, PAGE, 4 * MIB):
        fill_device(sim, free)
        for nbytes in (5 * MIB, 64 * MIB, 3 * GIB):
            with pytest.raises(OutOfDeviceMemoryError, match="CUDA out of memory") as caught:
                make_blocks(name, [nbytes])
            rounded = -(-nbytes // PAGE) * PAGE
            assert (caught.value.needed, caught.value.free) == (rounded, free)
            assert caught.value.tag == name
            assert f"'{other}'"[:40] in str(caught.value) and "8 MiB" in str(caught.value)
        assert held([name, other]) == 10 * MIB and reported() == sim.tag_bytes()
    more = make_blocks(name, [4 * MIB])  # a generous extent would not fit
    assert memsaver.device_memory(0)[0] == 0
    with pytest.raises(OutOfDeviceMemoryError):
        make_blocks(name, [5 * MIB])
    memsaver.pause(other)
    more += make_blocks(name, [8 * MIB])
    assert all(b.is_intact() for b in more) and kept.are_intact()
    del more
    memsaver.resume(other)
    assert rest.are_intact()


def test_a_pause_and_a_resume_on_a_full_device(sim, tag, make_blocks):
    name = tag()
    blocks = Fixed(sim, make_blocks(name, [3 * MIB, 6 * MIB], backup="host"))
    everything = held([name])
    fill_device(sim, 0)
    for _ in range(3):
        memsaver.pause(name)
        assert memsaver.device_memory(0)[0] == everything
        memsaver.resume(name)
        assert memsaver.device_memory(0)[0] == 0
        assert blocks.are_intact()
    blocks.blocks.clear()
    assert memsaver.device_memory(0)[0] == everything


@pytest.mark.parametrize(
    "limit",
    [0, 30 * MIB, *(pytest.param(each, marks=pytest.mark.long) for each in (4096, 20 * MIB))],
)
def test_host_memory_is_refused(sim, tag, make_blocks, limit):
    names = [tag("first"), tag("second")]
    parts = [make_blocks(name, [3 * MIB, 20 * MIB], backup="host") for name in names]
    blocks = Fixed(sim, chain.from_iterable(parts))
    everything = held(names)
    sim.host_limit(limit)
    with pytest.raises(OutOfHostMemoryError) as caught:
        memsaver.pause(*names)
    assert caught.value.needed > 0 and caught.value.tag in names
    assert caught.value.call == "cuMemHostRegister"
    assert states(names) == {"mapped"} and blocks.are_intact()
    assert held(names) == everything and reported() == sim.tag_bytes()
    assert sim.counts().registered_bytes == memsaver.stats().host_bytes <= limit
    memsaver.pause(*names, backup="none")  # needs no host memory
    memsaver.resume(*names)
    blocks.fill()
    sim.host_limit()
    memsaver.pause(*names)
    memsaver.resume(*names)
    assert blocks.are_intact()


# --- sizes that no device has ---------------------------------------------------------------------

HUGE = [1 << 40, 1 << 46, 1 << 49, 1 << 50, 1 << 62, 1 << 63, 2**64 - 2**30, 2**64 - 1]


@pytest.mark.parametrize("nbytes", HUGE, ids=hex)
def test_a_size_that_no_device_has(sim, tag, make_blocks, nbytes):
    name = tag()
    blocks = Fixed(sim, make_blocks(name, [MIB], backup="host"))
    before = sim.counts().reserved_bytes
    for _ in range(5):
        with memsaver.region(name):
            with pytest.raises(OutOfDeviceMemoryError) as caught:
                _C.malloc(nbytes)
        assert caught.value.needed >= nbytes and caught.value.tag == name
        assert caught.value.free == memsaver.device_memory(0)[0]
    assert sim.counts().reserved_bytes == before
    assert held([name]) == PAGE and reported() == sim.tag_bytes()
    memsaver.pause(name)
    memsaver.resume(name)
    more = make_blocks(name, [3 * MIB, 6 * MIB])
    assert blocks.are_intact() and all(b.is_intact() for b in more)


def test_as_much_as_the_device_has(sim, tag, make_blocks):
    # More than the free memory, but not more than the total: addresses are reserved only once.
    name = tag()
    blocks = make_blocks(name, [MIB])
    before = sim.counts().reserved_bytes
    for _ in range(5):
        with memsaver.region(name), pytest.raises(OutOfDeviceMemoryError):
            _C.malloc(80 * GIB)
    assert sim.counts().reserved_bytes - before <= 96 * GIB
    assert held([name]) == PAGE and reported() == sim.tag_bytes()
    with memsaver.region(name):
        address = _C.malloc(70 * GIB)
    assert sim.accessible(address) and sim.accessible(address + 70 * GIB - 1)
    _C.free(address)
    assert held([name]) == PAGE and reported() == sim.tag_bytes()
    assert blocks[0].is_intact()
