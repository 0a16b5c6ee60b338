"""Tests which calls wait for work on devices, and tests that calls do not invalidate captures."""

import ctypes

import pytest

import memsaver
from memsaver import simulator

MIB = 1 << 20


# --- work in flight -------------------------------------------------------------------------------


@pytest.mark.parametrize("backup", ["host", "none"])
def test_a_pause_waits_for_work_in_flight(sim, tag, make_blocks, backup):
    name = tag()
    (block,) = make_blocks(name, [4 * MIB], backup=backup)
    with sim.stream() as first, sim.stream() as second:
        sim.stream_delay(0.05)
        for value in (1, 2, 3):
            sim.memset(block.address, value, 2 * MIB, first)
            sim.memset(block.address + 2 * MIB, value + 10, 2 * MIB, second)
        sim.stream_delay(0)
        memsaver.pause(name)
        assert sim.counts().queued_operations == 0
        assert sim.violations() == []
    memsaver.resume(name)
    expected = bytes([3]) * (2 * MIB) + bytes([13]) * (2 * MIB)
    assert block.bytes() == (expected if backup == "host" else bytes(4 * MIB))


@pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")
def test_memory_of_a_device_that_cannot_be_queried_is_not_unmapped(sim, tag, make_blocks):
    """A device that cannot be queried counts as busy, so its memory is not unmapped."""
    name = tag()
    block, other = make_blocks(name, [2 * MIB, 2 * MIB], backup="host")
    with sim.stream() as stream:
        sim.stream_delay(0.05)
        for each in (block, other):
            sim.memset(each.address, 5, 2 * MIB, stream)
        with sim.fault("cuDevicePrimaryCtxGetState", times=0):
            with pytest.raises(memsaver.DriverError):
                memsaver.pause(name)
            del each, other  # which frees the block
        assert sim.counts().queued_operations > 0
        assert memsaver.state(name) == "mapped"
        sim.stream_delay(0)
    assert sim.violations() == []
    assert block.bytes() == bytes([5]) * (2 * MIB)
    memsaver.pause(name)
    assert sim.tag_bytes() == 0


def test_a_resume_fails_if_peer_access_is_unknown(run_python):
    """A resume fails if peer access is unknown. Otherwise, a peer could fault much later."""
    run_python(
        """
        import memsaver
        from memsaver import simulator
        from simulated_driver import Simulator

        sim = Simulator()
        for device in range(2):
            sim.start(device)
        with memsaver.region("a", backup="host"):
            block = simulator.buffer(4096)
        sim.write(block.address, b"x" * 4096)
        memsaver.pause("a")
        with sim.fault("cuDeviceCanAccessPeer"):
            try:
                memsaver.resume("a")
            except memsaver.DriverError as error:
                assert error.call == "cuDeviceCanAccessPeer", error
            else:
                raise AssertionError("it was resumed")
        assert memsaver.state("a") == "paused"
        memsaver.resume("a")
        assert sim.read(block.address, 4096) == b"x" * 4096
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


def test_a_pause_that_fails_has_not_disturbed_work_in_flight(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [4 * MIB], backup="host")
    with sim.stream() as stream:
        sim.stream_delay(0.05)
        sim.memset(block.address, 7, 4 * MIB, stream)
        with sim.fault("cuMemHostRegister", sim.OUT_OF_MEMORY, times=0):
            with pytest.raises(memsaver.OutOfHostMemoryError):
                memsaver.pause(name)
    assert block.bytes() == bytes([7]) * (4 * MIB)


def test_freeing_waits_for_work_in_flight(sim, tag):
    name = tag()
    with memsaver.region(name):
        block = simulator.buffer(64 * MIB)
    with sim.stream() as stream:
        sim.stream_delay(0.05)
        sim.memset(block.address, 7, 64 * MIB, stream)
        del block
        assert sim.violations() == []
    assert sim.tag_bytes() == 0


def test_copies_of_a_resume_are_done_when_it_returns(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [3 * MIB] * 3, backup="host")
    memsaver.pause(name)
    sim.stream_delay(0.05)
    memsaver.resume(name)
    assert sim.counts().queued_operations == 0
    sim.stream_delay(0)
    assert all(b.is_intact() for b in blocks)


def test_work_on_memory_of_no_tag_is_not_disturbed(sim, tag, make_blocks):
    name, other = tag("paused"), tag("used")
    make_blocks(name, [MIB])
    (block,) = make_blocks(other, [MIB])
    with sim.stream() as stream:
        sim.stream_delay(0.02)
        sim.memset(block.address, 9, MIB, stream)
        memsaver.pause(name)
    assert block.bytes() == bytes([9]) * MIB


# --- captures -------------------------------------------------------------------------------------


def test_allocating_and_freeing_keep_a_capture_valid(sim, tag, make_blocks):
    name = tag()
    first = make_blocks(name, [MIB, 64 * MIB])
    graph = ctypes.c_void_p()
    with sim.stream() as stream:
        for mode in (0, 1, 2):
            assert sim.opened.cuStreamBeginCapture_v2(stream, mode) == 0
            with memsaver.region(name):
                made = [simulator.buffer(n) for n in (4096, 3 * MIB, 64 * MIB)]
            sim.memset(made[1].address, 5, MIB, stream)
            del made, first[:]
            assert sim.opened.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0, "invalidated"
            sim.opened.cuGraphDestroy(graph)
            first += make_blocks(name, [MIB, 64 * MIB])
    first.clear()
    memsaver.pause(name)
    memsaver.resume(name)
    assert sim.tag_bytes() == 0


def test_a_pause_waits_for_other_devices(run_python):
    run_python(
        """
        import ctypes, memsaver
        from simulated_driver import Simulator
        from memsaver import simulator

        sim = Simulator()
        with memsaver.region("t"):
            here = simulator.buffer(2 << 20, 0)
        with memsaver.region("u"):
            there = simulator.buffer(2 << 20, 1)
        sim.stream_delay(0.2)
        library = sim.opened
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        assert library.cuDeviceGet(ctypes.byref(device), 1) == 0
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert library.cuCtxPushCurrent_v2(context) == 0
        assert library.cuStreamCreate(ctypes.byref(stream), 1) == 0
        copy = library.cuMemcpyDtoDAsync_v2
        copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        assert copy(there.address, here.address, 2 << 20, stream) == 0
        memsaver.pause("t")
        assert sim.violations() == [], sim.violations()
        """,
        MEMSAVER_SIM_DEVICES=2,
    )
