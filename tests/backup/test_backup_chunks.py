"""Tests the chunks of a backup: which chunks are pinned together, and which chunks are kept."""

import pytest
from driver_faults import Fixed
from looks import row_of

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import DriverError

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20


def pause_but(name, *holes):
    """Pause a tag that has holes that no tensor owns; return the number of bytes copied."""
    return sum(one[4] for one in _C.begin([name], [], -1, list(holes)).run())


@pytest.fixture
def make_block(sim, make_blocks):
    """Return a function that creates a block with known contents."""

    def make(name, nbytes, backup):
        return Fixed(sim, make_blocks(name, [nbytes], backup=backup))

    return make


def fill(fixed, hole):
    """Restore a hole's original contents."""
    address, nbytes = hole
    at = address - fixed.blocks[0].address
    fixed.sim.write(address, fixed.contents[0][at : at + nbytes])


@pytest.mark.parametrize("kind", ["host", "pageable", "disk"])
def test_a_small_hole_in_a_large_range(sim, tag, make_block, kind):
    # The parts share a page, or one of them is small; the chunks of the backup do not change.
    block = make_block(name := tag(), 66 * MIB, kind)
    start = block.blocks[0].address
    holes = [(start + 60 * MIB + 512, 512), (start + MIB, 2 * MIB)]
    assert pause_but(name) == 66 * MIB
    memsaver.resume(name)
    pinned = sim.calls("cuMemHostUnregister")
    for hole in holes:
        assert pause_but(name, hole) <= MIB  # the pieces next to the hole
        assert row_of(name).backup_bytes == 66 * MIB - hole[1]
        memsaver.resume(name)
        fill(block, hole)
        assert block.are_intact()
        assert pause_but(name) <= 3 * MIB
        memsaver.resume(name)
        assert block.are_intact()
    assert kind != "host" or sim.calls("cuMemHostUnregister") == pinned


def test_a_large_hole_in_a_range_that_cannot_be_unpinned(sim, tag, make_block):
    block = make_block(name := tag(), 148 * MIB, "host")
    hole = (block.blocks[0].address + 64 * MIB, 20 * MIB)
    with memsaver.paused(name):
        pass
    with sim.fault("cuMemHostUnregister"):
        pause_but(name, hole)
    assert row_of(name).backup_bytes == 128 * MIB and row_of(name).host_bytes == 148 * MIB
    memsaver.resume(name)
    pause_but(name, hole)
    assert row_of(name).host_bytes == 128 * MIB
    assert memsaver.stats().host_bytes >= sim.counts().registered_bytes
    memsaver.resume(name)
    fill(block, hole)
    assert block.are_intact()
    with sim.fault("cuMemHostUnregister"), pytest.raises(DriverError) as caught:
        memsaver.pause(name)  # needs one chunk in place of two
    assert caught.value.call == "cuMemHostUnregister" and caught.value.tag == name
    assert memsaver.state(name) == "mapped" and block.are_intact()
    with memsaver.paused(name):
        pass
    assert block.are_intact()


def test_small_neighbours_are_copied_together(sim, tag):
    with memsaver.region(name := tag(), backup="host"):
        blocks = [_C.malloc(512) for _ in range(4000)]
    for address in blocks:
        sim.write(address, address.to_bytes(8, "little"))
    before = {call: sim.calls(call) for call in ("cuMemcpyDtoHAsync", "cuLaunchKernel")}
    for _ in range(2):
        memsaver.pause(name)
        memsaver.resume(name)
    assert all(sim.calls(call) - before[call] <= 4 for call in before)
    for address in blocks:
        assert sim.read(address, 8) == address.to_bytes(8, "little")
        _C.free(address)


def test_blocks_that_share_pages_in_a_chain(sim, tag):
    # No block begins at a page boundary; nevertheless, their chunks are limited in size.
    with memsaver.region(name := tag(), backup="host"):
        blocks = [_C.malloc(512)] + [_C.malloc(64 << 10) for _ in range(2500)]
    for address in blocks:
        sim.write(address, address.to_bytes(8, "little"))
    pinned = sim.calls("cuMemHostRegister")
    memsaver.pause(name)
    assert sim.calls("cuMemHostRegister") - pinned >= 2
    memsaver.resume(name)
    for address in blocks:
        assert sim.read(address, 8) == address.to_bytes(8, "little")
        _C.free(address)
