"""Every driver call fails, one after the other: typed errors, nothing half done, nothing lost."""

import ctypes
from itertools import chain

import pytest
from driver_faults import (
    CODES,
    PAGE,
    Fault,
    Fixed,
    held,
    reported,
    states,
)

import memsaver
from memsaver import simulator
from memsaver.errors import (
    InvalidStateError,
    MemsaverError,
)
from memsaver.native import _C

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20
GIB = 1 << 30
SIZES = [4096, 100_000, PAGE + 512]


# --- one call fails -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("way", ["host, first", "host, other ranges", "none"])
def test_a_pause(sim, tag, make_blocks, each_fault, attempt, way, code):
    names = [tag("first"), tag("second")]
    parts = [make_blocks(name, SIZES, backup="host") for name in names]
    blocks = Fixed(sim, chain.from_iterable(parts))
    last = blocks.blocks[-1]
    policy = None if way.startswith("host") else "none"

    def before():
        memsaver.resume(*names)
        if policy == "none":
            blocks.fill()
        if way == "host, first":
            memsaver.trim(wait=True)  # pages must be pinned
        else:  # pages of the cycle before must be unpinned
            _C.pause(names, 1, [(last.address, last.nbytes)])
            memsaver.resume(*names)
            blocks.fill()

    def pause():
        memsaver.pause(*names, backup=policy)

    for fault in each_fault(before, pause, code):
        before_it = held(names)
        error = attempt(pause, fault)
        if error is not None:
            assert states(names) == {"mapped"}, fault
            assert blocks.are_intact(), fault
            assert held(names) == before_it and reported() == sim.tag_bytes(), fault
            assert attempt(pause) is None, fault
            assert reported() == sim.tag_bytes(), fault
        assert states(names) == {"paused"}, fault
        assert blocks.are_gone() and held(names) == 0, fault
        memsaver.resume(*names)  # also collects what could not be given back
        assert blocks.are_zero() if policy == "none" else blocks.are_intact(), fault
        assert reported() == sim.tag_bytes(), fault
        assert sim.counts().registered_bytes == memsaver.stats().host_bytes, fault
    assert sim.violations() == []


@pytest.mark.long
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("backup", ["host", "none"])
def test_a_resume(sim, tag, make_blocks, each_fault, attempt, backup, code):
    names = [tag("first"), tag("second")]
    parts = [make_blocks(name, SIZES, backup=backup) for name in names]
    blocks = Fixed(sim, chain.from_iterable(parts))

    def before():
        memsaver.resume(*names)
        blocks.fill()
        memsaver.pause(*names)

    def resume():
        memsaver.resume(*names)

    for fault in each_fault(before, resume, code):
        error = attempt(resume, fault)
        if error is not None:
            assert states(names) == {"paused"}, fault
            assert held(names) == 0 and reported() == sim.tag_bytes(), fault
            assert blocks.are_gone(), fault
            assert attempt(resume) is None, fault
        assert states(names) == {"mapped"}, fault
        assert blocks.are_intact() if backup == "host" else blocks.are_zero(), fault
        assert held(names) > 0 and reported() == sim.tag_bytes(), fault
    assert sim.violations() == []


@pytest.mark.long
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize(
    "nbytes, first",
    [(100_000, False), (3 * MIB, False), (64 * MIB, False), (2 * GIB + 1, False), (3 * MIB, True)],
    ids=["100kB", "3MiB", "64MiB", "2GiB", "first of its tag"],
)
def test_an_allocation(sim, tag, make_blocks, each_fault, attempt, nbytes, first, code):
    kept = tag("kept")
    old = Fixed(sim, make_blocks(kept, [] if first else [PAGE], backup="host"))
    got, names = [], [kept]

    def before():
        got.clear()
        if first:
            names.append(tag("new"))

    def allocate():
        with memsaver.region(names[-1]):
            got.append(simulator.buffer(nbytes))

    for fault in each_fault(before, allocate, code):
        before_it, owned = held(names), len(old.blocks)
        error = attempt(allocate, fault)
        if error is not None:
            assert got == [] and len(memsaver.ranges(names[-1])) == owned, fault
            assert held(names) == before_it and reported() == sim.tag_bytes(), fault
            assert memsaver.state(names[-1]) == "mapped", fault
            assert attempt(allocate) is None, fault
        (block,) = got
        for at in (0, nbytes - 1):
            sim.write(block.address + at, b"x")
        assert held(names) >= nbytes and reported() == sim.tag_bytes(), fault
        assert len(memsaver.ranges(names[-1])) == owned + 1, fault
        assert old.are_intact(), fault
        del block
        got.clear()
        assert held(names) == before_it and reported() == sim.tag_bytes(), fault
    assert sim.violations() == []


@pytest.mark.long
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
@pytest.mark.parametrize("sizes", [[PAGE], [64 * MIB], [3 * GIB]], ids=["2MiB", "64MiB", "3GiB"])
def test_a_free(sim, tag, make_blocks, each_fault, sizes, code):
    # No free may fail for its caller; what could not be given back yet stays counted, and goes
    # back with the next call for the tag.
    name = tag()
    kept = Fixed(sim, make_blocks(name, [512], backup="host"))
    before_it = held([name])
    made = []

    def before():
        made.clear()
        with memsaver.region(name):
            made.extend(_C.malloc(n) for n in sizes)

    def free():
        while made:
            _C.free(made.pop())

    for fault in each_fault(before, free, code):
        with sim.fault(fault.call, fault.code, fault.nth, fault.times):
            free()
        assert len(memsaver.ranges(name)) == 1, fault
        if fault.call != "cuMemRelease":
            assert reported() == sim.tag_bytes(), fault
        with memsaver.region(name):
            again = simulator.buffer(PAGE)
        sim.write(again.address, b"x")
        del again
        assert kept.are_intact(), fault
        assert held([name]) == before_it and reported() == sim.tag_bytes(), fault
    assert sim.violations() == []


# --- several calls fail ---------------------------------------------------------------------------


@pytest.fixture
def keep_pages(sim, attempt):
    """Pauses tags so that the nth unmapping fails, and mapping again too: pages stay held."""

    def pause(names, nth=2, call="cuMemMap", code=1, **options):
        faults = [Fault("cuMemUnmap", nth, 1, code), Fault(call, 1, 0, code)]
        error = attempt(lambda: memsaver.pause(*names, **options), *faults)
        assert error is not None and "resume them" in str(error)
        assert states(names) == {"paused"}

    return pause


@pytest.mark.parametrize("backup", ["host", "none"])
@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess"])
def test_pages_that_cannot_be_mapped_again_are_kept(
    sim, tag, make_blocks, options, keep_pages, call, backup
):
    options(share_bytes="2MiB", slab_bytes="2MiB")  # a piece each
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


def test_kept_pages_of_freed_blocks_go_back(sim, tag, make_blocks, options, keep_pages):
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


def test_a_resume_of_kept_pages_fails_in_every_way(
    sim, tag, make_blocks, options, attempt, keep_pages
):
    # These pages are the only copy of the contents: no failure may give them back.
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
    # What cannot be given back is given back by the next transition, or allocation.
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
    # Counted as long as they are held, usable for the next pause, and given back in the end.
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
            _C.pause([name], 1, [(blocks.blocks[0].address, PAGE)])
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
def test_a_full_device_is_waited_for_with_a_page_of_the_host(sim, tag, make_blocks, code):
    # The error is that of the call that was refused, and a page that stays pinned is used again.
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
            mode = ctypes.c_int(0)  # global: what a thread starts with
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


# --- frees that could not be done -----------------------------------------------------------------


def test_a_free_whose_memory_could_not_be_unmapped(sim, tag, make_blocks):
    name = tag()
    kept, gone = make_blocks(name, [64 * MIB, 64 * MIB], backup="host")
    where = gone.address
    with sim.fault("cuMemUnmap", times=0):
        del gone
        assert [r.address for r in memsaver.ranges(name)] == [kept.address]
        assert held([name]) == 128 * MIB and reported() == sim.tag_bytes()
    with pytest.raises(memsaver.ConfigError, match="freed twice"):
        _C.free(where)
    (again,) = make_blocks(name, [64 * MIB])
    assert held([name]) == 128 * MIB and reported() == sim.tag_bytes()
    assert kept.is_intact() and again.is_intact()
    with sim.fault("cuMemUnmap", times=0):
        del again
    memsaver.pause(name)
    assert held([name]) == 0 and reported() == sim.tag_bytes()
    memsaver.resume(name)
    assert kept.is_intact()
    assert held([name]) == 64 * MIB and reported() == sim.tag_bytes()


def test_a_free_that_fails_is_a_warning(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [64 * MIB])
    with sim.fault("cuMemUnmap", times=0):
        with pytest.warns(memsaver.MemsaverWarning, match="stays held for now") as caught:
            del block
    assert all(name in str(w.message) or "cuMemUnmap" in str(w.message) for w in caught)


# --- the first use --------------------------------------------------------------------------------


@pytest.mark.long
def test_the_first_use_of_a_device(run_python):
    # Each fault in a process of its own, forked before the driver is opened.
    done = run_python(
        r"""
        import itertools, os, re, sys, traceback, warnings
        import memsaver
        from repository import ROOT
        from simulated_driver import Block, Simulator

        warnings.simplefilter("ignore")
        calls = re.findall(r"X\((cu\w+)\)", (ROOT / "csrc/core/driver.h").read_text())
        sim = Simulator()

        def use():
            with memsaver.region("t", backup="host"):
                block = Block(sim, 3 << 20, 1)
            with memsaver.paused("t"):
                pass
            assert block.is_intact()

        def in_child(function):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    os.write(writer, repr(function()).encode())
                    status = 0
                except BaseException:
                    traceback.print_exc()
                    status = 1
                sys.stderr.flush()
                os._exit(status)
            os.close(writer)
            text = os.read(reader, 65536).decode()
            os.close(reader)
            return text if os.waitpid(child, 0)[1] == 0 else None

        def count():
            use()
            return {name: sim.calls(name) for name in calls}

        def faulty(call, nth, times, code):
            sim.fail(call, code, nth, times)
            try:
                use()
            except memsaver.MemsaverError as error:
                assert type(error) is not memsaver.MemsaverError, repr(error)
            sim.clear_faults()
            memsaver.resume()
            use()
            counts = sim.counts()
            # One for each direction; and one that could not be destroyed.
            lost = call == "cuStreamDestroy" and times == 0
            assert counts.streams <= 2 + lost and not sim.violations()
            assert counts.retained_contexts == 1, counts.retained_contexts
            memsaver.trim(wait=True)
            assert sim.counts().registered_bytes == 0
            assert memsaver.stats().resident_bytes == 0 == sim.counts().handles

        made = eval(in_child(count))
        assert made["cuMemCreate"] and made["cuDevicePrimaryCtxRetain"]
        failed, codes = [], itertools.cycle([1, 2, 719])
        for name, number in made.items():
            for nth in range(1, number + 1):
                for times in (1, 0):
                    fault = (name, nth, times, next(codes))
                    if in_child(lambda: faulty(*fault)) is None:
                        failed.append(fault)
        assert not failed, failed
        print(sum(made.values()), "calls")
        """,
        timeout=110,
    )
    assert int(done.stdout.split()[0]) > 30
