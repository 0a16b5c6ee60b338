"""Tests that no contents are lost if driver calls fail during a transition and its rollback."""

import ctypes
from itertools import chain

import pytest
from driver_faults import (
    PAGE,
    TYPED,
    Fault,
    Fixed,
    held,
    reported,
    states,
)

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C
from memsaver.errors import (
    InvalidStateError,
    MemsaverError,
)

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20
GIB = 1 << 30
SIZES = [4096, 100_000, PAGE + 512]


@pytest.fixture
def attempt(sim, in_thread):
    """Run an action under faults; return its error, or None.

    Fails if the error is not one of memsaver's types.
    """

    def act(action, *faults):
        for fault in faults:
            sim.fail(fault.call, fault.code, fault.nth, fault.times)
        try:
            in_thread(action).result()
        except MemsaverError as error:
            assert type(error) in TYPED, repr(error)
            assert error.call and error.cuda_error, repr(error)
            return error
        finally:
            sim.clear_faults()
        return None

    return act


@pytest.fixture
def keep_pages(sim, attempt):
    """Return a function that pauses tags while an unmapping call and its rollback fail.

    Afterwards, the tags are paused and their pages are retained.
    """

    def pause(names, nth=2, call="cuMemMap", code=1, **options):
        faults = [Fault("cuMemUnmap", nth, 1, code), Fault(call, 1, 0, code)]
        error = attempt(lambda: memsaver.pause(*names, **options), *faults)
        assert error is not None and "resume them" in str(error)
        assert states(names) == {"paused"}

    return pause


@pytest.mark.parametrize("backup", ["host", "none"])
@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_pages_that_cannot_be_mapped_again_are_retained(
    sim, tag, make_blocks, options, keep_pages, call, backup
):
    options(share_bytes="2MiB", slab_bytes="2MiB")  # one piece for each block
    names = [tag("first"), tag("second")]
    parts = [make_blocks(name, [PAGE, 4 * MIB, PAGE], backup=backup) for name in names]
    blocks = Fixed(sim, chain.from_iterable(parts))
    everything = held(names)
    extents = sim.counts().mappings
    for nth in range(2, 7):
        keep_pages(names, nth, call)
        assert sim.counts().mappings < extents
        assert held(names) == everything and reported() == sim.tag_bytes()
        for name in names:
            with pytest.raises(InvalidStateError):
                with memsaver.region(name):
                    pytest.fail("entered")
        assert memsaver.pause(*names).changed == ()
        assert set(memsaver.resume(*names).changed) == set(names)
        assert blocks.are_intact(), nth
        assert held(names) == everything and reported() == sim.tag_bytes()
    memsaver.pause(*names)
    assert held(names) == 0 and reported() == sim.tag_bytes()
    memsaver.resume(*names)
    assert blocks.are_intact() if backup == "host" else blocks.are_zero()


def test_retained_pages_of_freed_blocks_are_released(sim, tag, make_blocks, options, keep_pages):
    options(share_bytes="2MiB", slab_bytes="2MiB")
    name = tag()
    parts = make_blocks(name, [PAGE] * 4)
    keep_pages([name], nth=3)
    for left in (3, 2):
        del parts[0]
        assert held([name]) == left * PAGE and reported() == sim.tag_bytes()
    memsaver.resume(name)
    assert all(b.is_intact() for b in parts)
    keep_pages([name])
    parts.clear()
    assert held([name]) == 0 and reported() == sim.tag_bytes()
    assert memsaver.resume(name).bytes == 0
    parts += make_blocks(name, [PAGE])
    assert parts[0].is_intact()


def test_a_resume_of_retained_pages_fails_in_every_way(
    sim, tag, make_blocks, options, attempt, keep_pages
):
    # These pages are the only copy of the contents: no failure may release them.
    options(share_bytes="2MiB", slab_bytes="2MiB")
    name = tag()
    blocks = Fixed(sim, make_blocks(name, [PAGE] * 4))
    everything = held([name])

    def resume():
        memsaver.resume(name)

    for call in ("cuMemMap", "cuMemSetAccess", "cuDeviceGetCount"):
        for nth in (1, 2, 3):
            for undone in (None, Fault("cuMemUnmap", 1, 1, 1), Fault("cuMemUnmap", 1, 0, 1)):
                keep_pages([name], nth=4)
                faults = [Fault(call, nth, 1, 1)] + ([undone] if undone else [])
                error = attempt(resume, *faults)
                assert memsaver.state(name) == ("paused" if error else "mapped"), faults
                assert held([name]) == everything and reported() == sim.tag_bytes(), faults
                memsaver.resume(name)
                assert blocks.are_intact(), faults
                assert held([name]) == everything and reported() == sim.tag_bytes(), faults


@pytest.mark.long
@pytest.mark.parametrize("times", [1, 0], ids=["once", "from then on"])
@pytest.mark.parametrize("second", ["cuMemUnmap", "cuMemRelease", "cuStreamSynchronize"])
def test_a_resume_and_its_undoing(sim, tag, make_blocks, each_fault, attempt, second, times):
    # Releases that fail are retried by the next transition or allocation.
    names = [tag("first"), tag("second")]
    parts = [make_blocks(name, SIZES, backup="host") for name in names]
    blocks = Fixed(sim, chain.from_iterable(parts))

    def before():
        memsaver.resume(*names)
        memsaver.pause(*names)

    def resume():
        memsaver.resume(*names)

    for fault in each_fault(before, resume, 1):
        if fault.times == 0 or fault.call in (second, "cuCtxGetCurrent", "cuCtxPopCurrent"):
            continue
        error = attempt(resume, fault, Fault(second, 1, times, 1))
        if error is not None:
            assert states(names) == {"paused"} and held(names) == 0, fault
            assert attempt(resume) is None, fault
        assert states(names) == {"mapped"}, fault
        assert blocks.are_intact(), fault
        assert reported() == sim.tag_bytes(), fault
    assert sim.violations() == []


@pytest.mark.parametrize("second", ["cuMemUnmap", "cuMemRelease"])
def test_an_allocation_and_its_undoing(sim, tag, attempt, second):
    name = tag()
    got = []

    def allocate(nbytes=3 * GIB):
        with memsaver.region(name):
            got.append(simulator.buffer(nbytes))

    for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        for nth in (1, 2, 3):
            for code in (1, 2):
                faults = [Fault(call, nth, 1, code), Fault(second, 1, 0, 1)]
                attempt(allocate, *faults)
                got.clear()
                allocate(64 * MIB)
                sim.write(got[0].address + 64 * MIB - 1, b"x")
                got.clear()
                assert held([name]) == 0 and reported() == sim.tag_bytes(), faults


@pytest.mark.parametrize("undo", ["pause", "trim", "none"])
def test_pages_that_could_not_be_unpinned(sim, tag, make_blocks, undo):
    # The pages are counted while they are held, usable for the next pause, and finally released.
    name = tag()
    blocks = Fixed(sim, make_blocks(name, [3 * MIB, 70 * MIB], backup="host"))
    memsaver.pause(name)
    memsaver.resume(name)
    with sim.fault("cuMemHostUnregister", times=0):
        if undo == "trim":
            memsaver.trim(wait=True)
        elif undo == "none":
            memsaver.pause(name, backup="none")
        else:
            _C.begin([name], [], 1, [(blocks.blocks[0].address, PAGE)]).run()
    memsaver.resume(name)
    blocks.fill()
    assert memsaver.stats().host_bytes == sim.counts().registered_bytes
    for _ in range(2):
        memsaver.pause(name)
        memsaver.resume(name)
        assert blocks.are_intact()
    memsaver.trim(wait=True)
    assert memsaver.stats().host_bytes == sim.counts().registered_bytes == 0


@pytest.mark.parametrize("code", [2, 712])
@pytest.mark.parametrize("room", [False, True])
def test_a_full_device_is_waited_for_with_a_page_of_the_host(sim, tag, make_blocks, code, room):
    # The error is that of the call that failed. The next wait uses the page that stays pinned, even
    # if the device has free memory again.
    name = tag()
    [block] = make_blocks(name, [MIB], backup="host")
    with sim.fault("cuMemAlloc", 2, times=0):
        sim.fail("cuMemHostRegister", code, times=0)
        with pytest.raises(MemsaverError, match="cuMemHostRegister") as raised:
            memsaver.pause(name)
        assert raised.value.cuda_error == code
    with sim.fault("cuMemAlloc", 2, times=0):
        sim.fail("cuMemHostUnregister", 1)
        with pytest.raises(MemsaverError, match="cuMemHostUnregister"):
            memsaver.pause(name)
        assert states([name]) == {"mapped"} and block.is_intact()
        if room:
            sim.clear_faults()
        memsaver.pause(name)
        memsaver.resume(name)
    assert block.is_intact()
    memsaver.trim(wait=True)
    assert sim.counts().registered_bytes == 0


def test_a_page_waits_for_the_device_that_is_full(run_python):
    # One device's page stays pinned; unpinning it would wait for that device, not for the other.
    done = run_python(
        """
        import threading
        import memsaver
        from memsaver import simulator
        from simulated_driver import Simulator

        MIB = 1 << 20
        sim, blocks = Simulator(), []
        for device in range(2):
            sim.start(device)
            with memsaver.region(str(device), backup="host"):
                blocks.append(simulator.buffer(4 * MIB, device))
        with sim.stream() as stream, sim.fault("cuMemAlloc", 2, times=0):
            sim.fail("cuMemHostUnregister", 1, nth=2)  # the second device's
            try:
                memsaver.pause("1")
            except memsaver.DriverError as error:
                assert error.call == "cuMemHostUnregister"
            sim.hold_streams(True)
            sim.memset(blocks[0].address, 5, 4 * MIB, stream)
            release = threading.Timer(0.3, sim.hold_streams, [False])
            release.start()
            memsaver.pause("0")
            release.join()
        memsaver.resume()
        assert sim.read(blocks[0].address, 4 * MIB) == b"\\5" * 4 * MIB
        print(sim.violations())
        """,
        MEMSAVER_SIM_DEVICES=2,
    )
    assert done.stdout == "[]\n"


def test_a_failure_leaves_the_threads_capture_mode(sim, tag, make_blocks, attempt):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")

    def pause_and_look():
        memsaver.device_memory(0)
        try:
            memsaver.pause(name)
        finally:
            mode = ctypes.c_int(0)  # global: the mode of a new thread
            sim.clear_faults()
            sim.opened.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            seen.append(mode.value)

    for nth in (1, 3, 5):
        seen = []
        memsaver.resume(name)
        attempt(pause_and_look, Fault("cuThreadExchangeStreamCaptureMode", nth + 2, 1, 1))
        assert seen == [0], nth
    memsaver.resume(name)
    assert blocks[0].is_intact()
