"""Make each driver call fail: errors are typed, calls are all or nothing, no contents are lost."""

from itertools import chain

import pytest
from driver_faults import (
    CODES,
    PAGE,
    Fixed,
    held,
    reported,
    states,
)

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20
GIB = 1 << 30
SIZES = [4096, 100_000, PAGE + 512]


# --- one call fails -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transition, call",
    [
        ("pause", "cuMemUnmap"),
        ("pause", "cuLaunchKernel"),
        ("resume", "cuMemMap"),
        ("resume", "cuMemSetAccess"),
        ("swap", "cuEventRecord"),
    ],
)
def test_the_error_of_a_driver_call_names_the_tags_and_the_bytes(
    sim, tag, make_blocks, transition, call
):
    out, into = tag("out"), tag("into")
    blocks = [make_blocks(name, [2 * MIB], backup="host")[0] for name in (out, into)]
    memsaver.pause(into)
    run, names = {
        "pause": (lambda: memsaver.pause(out), {out}),
        "resume": (lambda: memsaver.resume(into), {into}),
        "swap": (lambda: memsaver.swap(out=out, into=into), {out, into}),
    }[transition]
    with simulator.fault(call, 999, times=0), pytest.raises(memsaver.DriverError) as caught:
        run()
    text = str(caught.value)
    assert text.startswith(f"{call} failed with CUDA_ERROR_UNKNOWN (999)")
    assert all(f"'{name}'" in text for name in names) and "2097152 bytes" in text
    assert text.endswith("failed and was undone: it can be tried again")
    run()
    memsaver.resume()
    assert all(block.is_intact() for block in blocks)


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
        else:  # pages of the previous cycle must be unpinned
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
        memsaver.resume(*names)  # also retries failed releases
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
    # No free may raise; memory that it could not release stays counted, and is released by the next
    # call for the tag.
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


# --- frees that failed ----------------------------------------------------------------------------


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
        with pytest.warns(memsaver.MemsaverWarning, match="could not be released yet") as caught:
            del block
    assert all(name in str(w.message) or "cuMemUnmap" in str(w.message) for w in caught)


def test_refused_releases_are_counted_and_retried(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [64 * MIB], backup="pageable")
    assert memsaver.stats().deferred == memsaver.Deferred()
    for call in ("cuMemRelease", "cuMemHostUnregister"):
        with sim.fault(call, times=0):
            with pytest.warns(memsaver.MemsaverWarning, match="stay allocated until the next"):
                memsaver.pause(name)
            deferred = memsaver.stats().deferred
            assert deferred.objects > 0
            if call == "cuMemRelease":
                assert deferred.device_bytes == sim.tag_bytes() > 0 == deferred.host_bytes
            else:
                assert 0 < deferred.host_bytes <= memsaver.stats().host_bytes
                assert deferred.device_bytes == 0
        memsaver.resume(name)
        assert memsaver.stats().deferred == memsaver.Deferred()
        assert all(block.is_intact() for block in blocks) and reported() == sim.tag_bytes()
        blocks[0].fill(7)


# --- the first use --------------------------------------------------------------------------------


@pytest.mark.long
def test_the_first_use_of_a_device(run_python):
    # Each fault runs in a separate process, forked before the driver is opened.
    done = run_python(
        r"""
        import itertools, os, re, sys, traceback, warnings
        import memsaver
        from repository import ROOT
        from simulated_driver import Block, Simulator

        warnings.simplefilter("ignore")
        calls = re.findall(r"X\((cu\w+)\)", (ROOT / "csrc/core/driver/driver.h").read_text())
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
