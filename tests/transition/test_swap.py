"""Tests swaps on the simulated driver, down to each page that they transfer."""

import itertools

import pytest
from driver_faults import fill_device

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import InvalidStateError, OutOfDeviceMemoryError

MIB = 1 << 20
GIB = 1 << 30
PAGE = 2 * MIB
KINDS = ["none", "host", "pageable", "disk"]


def came_back(blocks, backup="host"):
    return all(b.is_zero() if backup == "none" else b.is_intact() for b in blocks)


def held(*names):
    return sum(row.resident_bytes for row in memsaver.stats().tags if row.tag in names)


def made(sim):
    return sim.calls("cuMemCreate"), sim.calls("cuMemRelease")


# --- contents and pages ---------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids="/".join)
def test_a_swap_keeps_contents(sim, tag, make_blocks, make_paused, options, tmp_path, kinds):
    options(disk_dir=str(tmp_path), share_bytes="4MiB", slab_bytes="2MiB")
    first, more, second = tag("first"), tag("more"), tag("second")
    out = make_blocks(first, [5000, PAGE + 512, PAGE, 100], backup=kinds[0])
    out += make_blocks(more, [3 * MIB], backup=kinds[0])
    into = make_paused(second, [PAGE, 700, 3 * MIB], kinds[1])
    places = [b.address for b in out + into]
    for _ in range(2 if kinds[0] == kinds[1] else 1):
        memsaver.swap(out=[first, more], into=second)
        assert held(first, more) == 0 and held(second) == sim.tag_bytes()
        assert not any(sim.accessible(b.address) for b in out)
        assert came_back(into, kinds[1])
        for b in into:
            b.fill(b.seed + 1000)
        memsaver.swap(out=second, into=[first, more])
        assert held(second) == 0 and held(first, more) == sim.tag_bytes()
        assert came_back(out, kinds[0])
        for b in out:
            b.fill(b.seed + 1000)
    memsaver.resume(second)
    assert came_back(into, kinds[1]) and [b.address for b in out + into] == places


def test_a_swap_on_a_full_device_transfers_the_pages(sim, tag, make_blocks, make_paused, options):
    options(share_bytes="2MiB", slab_bytes="2MiB")
    first, second = tag("first"), tag("second")
    into = make_paused(second, [PAGE] * 4)
    out = make_blocks(first, [PAGE] * 4, backup="host")
    before = made(sim)
    fill_device(sim, 0)
    memsaver.swap(out=first, into=second)
    assert came_back(into) and made(sim) == before
    memsaver.swap(out=second, into=first)
    assert came_back(out) and made(sim) == before
    assert held(first) == sim.tag_bytes() == 4 * PAGE


def test_pages_that_do_not_fit_are_new_or_released(sim, tag, make_blocks, make_paused, options):
    options(share_bytes="2MiB", slab_bytes="2MiB")
    first, second = tag("first"), tag("second")
    into = make_paused(second, [PAGE] * 3)
    out = make_blocks(first, [PAGE] * 5, backup="host")
    creates, releases = made(sim)
    memsaver.swap(out=first, into=second)
    assert made(sim) == (creates, releases + 2)
    assert held(second) == sim.tag_bytes() == 3 * PAGE
    memsaver.swap(out=second, into=first)
    assert made(sim) == (creates + 1, releases + 2)  # adjacent blocks share one page
    assert held(first) == sim.tag_bytes() == 5 * PAGE
    assert came_back(out)
    memsaver.resume(second)
    assert came_back(into)


def test_a_page_larger_than_needed_on_a_full_device(sim, tag, make_blocks, make_paused):
    first, second = tag("first"), tag("second")
    into = make_paused(second, [3 * MIB, 5000])
    out = make_blocks(first, [16 * MIB], backup="host")
    fill_device(sim, 0)
    creates, releases = made(sim)
    seen = []
    report = memsaver.swap(
        out=first, into=second, progress=lambda done, total: seen.append((done, total))
    )
    assert came_back(into) and made(sim) == (creates + 1, releases)  # the creation failed
    assert held(second) == sim.tag_bytes() == 16 * MIB  # the whole page is counted
    assert seen[-1] == (report.copied_bytes, report.copied_bytes)
    more = make_blocks(second, [PAGE])  # allocated in the same page
    assert held(second) == sim.tag_bytes() == 16 * MIB
    more.clear()
    memsaver.swap(out=second, into=first)
    assert came_back(out) and held(first) == sim.tag_bytes() == 16 * MIB
    sim.occupy(0)
    memsaver.resume(second)
    assert came_back(into) and held(second) < 16 * MIB


def test_no_room_is_an_error_and_changes_nothing(sim, tag, make_blocks, make_paused):
    first, second = tag("first"), tag("second")
    into = make_paused(second, [16 * MIB])
    out = make_blocks(first, [3 * MIB], backup="host")
    fill_device(sim, 2 * MIB)
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        memsaver.swap(out=first, into=second)
    assert caught.value.needed > 0 and caught.value.tag == second
    assert memsaver.state(first) == "mapped" and memsaver.state(second) == "paused"
    assert came_back(out) and held(first) == sim.tag_bytes() == 4 * MIB
    sim.occupy(0)
    memsaver.resume(second)
    assert came_back(into)


@pytest.mark.parametrize("backup", ["host", "none"])
def test_gaps_freed_blocks_and_several_spans(sim, tag, make_blocks, make_paused, options, backup):
    options(share_bytes="4MiB", slab_bytes="2MiB")
    first, second = tag("first"), tag("second")
    out = make_blocks(first, [5000, PAGE, 3 * MIB, 700, PAGE], backup="host")
    del out[1]
    into = make_blocks(second, [3 * MIB], backup=backup)
    with memsaver.region(second):
        hole = _C.malloc(32 * GIB - 6 * MIB)
    into += make_blocks(second, [PAGE, 5000, PAGE, 600, 4 * MIB])  # in another span
    _C.free(hole)
    assert max(b.address for b in into) - min(b.address for b in into) >= 31 * GIB
    memsaver.pause(second)
    del into[2]
    for _ in range(2):
        memsaver.swap(out=first, into=second)
        assert came_back(into, backup) and held(second) == sim.tag_bytes()
        del into[-1]
        for b in into:
            b.fill(b.seed + 1)
        memsaver.swap(out=second, into=first)
        assert came_back(out) and held(first) == sim.tag_bytes()
        del out[-1]
    memsaver.resume(second)
    assert came_back(into, backup)


# --- reports --------------------------------------------------------------------------------------


def test_reports_states_and_statistics(sim, tag, make_blocks, make_paused):
    first, second, there, gone = (tag(n) for n in ("first", "second", "there", "gone"))
    out = make_blocks(first, [4 * MIB], backup="host")
    into = make_paused(second, [PAGE], "none")
    others = make_blocks(there, [PAGE], backup="host") + make_paused(gone, [PAGE])
    report = memsaver.swap(out=[first, gone], into=[second, there])
    rows = [(c.tag, c.changed, c.device_bytes, c.copied_bytes) for c in report.changes]
    assert rows == [
        (first, True, 4 * MIB, 4 * MIB),
        (gone, False, 0, 0),
        (second, True, PAGE, 0),
        (there, False, 0, 0),
    ]
    assert report.changed == (first, second) and report.bytes == 6 * MIB
    stats = memsaver.stats()
    assert (stats[first][0].pauses, stats[first][0].resumes) == (1, 0)
    assert (stats[second][0].pauses, stats[second][0].resumes) == (1, 1)
    assert (stats[gone][0].pauses, stats[there][0].resumes) == (1, 0)
    assert stats[first][0].resident_bytes == 0 < stats[first][0].host_bytes
    again = memsaver.swap(out=first, into=second)
    assert again.changed == () and again.bytes == 0
    memsaver.resume(first, gone)
    assert came_back(out) and came_back(others) and came_back(into, "none")


def test_an_open_region_of_a_tag_to_pause(sim, tag, make_blocks, make_paused):
    first, second = tag("first"), tag("second")
    out, into = make_blocks(first, [PAGE], backup="host"), make_paused(second, [PAGE])
    with memsaver.region(first), pytest.raises(InvalidStateError, match="region"):
        memsaver.swap(out=first, into=second)
    assert memsaver.state(second) == "paused" and came_back(out)
    memsaver.swap(out=first, into=second)
    assert came_back(into)


# --- concurrent calls -----------------------------------------------------------------------------


def test_work_in_flight_is_saved(sim, tag, make_blocks, make_paused):
    first, second = tag("first"), tag("second")
    (out,), into = make_blocks(first, [4 * MIB], backup="host"), make_paused(second, [4 * MIB])
    with sim.stream() as stream:
        sim.stream_delay(0.05)
        sim.memset(out.address, 7, out.nbytes, stream)
        memsaver.swap(out=first, into=second)
        sim.stream_delay(0)
    assert came_back(into) and sim.violations() == []
    memsaver.resume(first)
    assert out.bytes() == b"\x07" * out.nbytes


@pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")
@pytest.mark.parametrize("call, nth", [("cuMemMap", 2), ("cuMemMap", 3), ("cuMemUnmap", 3)])
def test_a_failure_unmaps_nothing_that_is_being_cleared(
    sim, tag, make_blocks, make_paused, options, call, nth
):
    options(share_bytes="2MiB", slab_bytes="2MiB")
    first, second = tag("first"), tag("second")
    out = make_blocks(first, [PAGE] * 4, backup="host")
    into = make_paused(second, [PAGE] * 4, "none")
    sim.stream_delay(0.01)
    with sim.fault(call, 1, nth), pytest.raises(memsaver.DriverError):
        memsaver.swap(out=first, into=second)
    sim.stream_delay(0)
    assert sim.violations() == [] and came_back(out)
    memsaver.resume(second)
    assert came_back(into, "none")


def test_frees_from_another_thread(sim, tag, make_blocks, make_paused, options):
    options(share_bytes="2MiB", slab_bytes="2MiB")
    first, second = tag("first"), tag("second")
    out, into = make_blocks(first, [PAGE] * 3, backup="host"), make_paused(second, [PAGE] * 3)
    sim.hold_streams(True)
    swap = memsaver.swap(out=first, into=second, wait=False)
    assert memsaver.state(first) == "saving" and memsaver.state(second) == "restoring"
    del out[1], into[0]
    sim.hold_streams(False)
    swap.wait()
    assert held(second) == sim.tag_bytes() == 2 * PAGE and came_back(into)
    memsaver.resume(first)
    assert held(first) == 2 * PAGE and came_back(out)


def test_a_conflicting_pause_waits_and_is_waited_for(sim, tag, make_blocks, make_paused, in_thread):
    first, second = tag("first"), tag("second")
    out, into = make_blocks(first, [PAGE], backup="host"), make_paused(second, [PAGE])
    sim.hold_streams(True)
    swap = memsaver.swap(out=first, into=second, wait=False)
    pause = in_thread(memsaver.pause, second)
    pause.join(0.05)
    assert pause.is_alive() and memsaver.state(second) == "restoring"
    sim.hold_streams(False)
    assert swap.wait().changed == (first, second) and pause.result().changed == (second,)
    memsaver.resume(first)
    for b in out:
        b.fill(b.seed + 1)
    sim.hold_streams(True)
    under_way = memsaver.pause(first, wait=False)
    other = in_thread(memsaver.swap, out=first, into=second)
    other.join(0.05)
    assert other.is_alive() and memsaver.state(second) == "paused"
    sim.hold_streams(False)
    under_way.wait()
    assert other.result().changed == (second,) and came_back(into)
    memsaver.resume(first)
    assert came_back(out)


# --- two devices ----------------------------------------------------------------------------------


def test_two_devices(run_python):
    run_python(
        """
        import memsaver
        from simulated_driver import Block, Simulator

        sim, MIB = Simulator(), 1 << 20
        sim.start(0), sim.start(1)

        def make(tag, *places):
            with memsaver.region(tag, backup="host"):
                return [Block(sim, n * MIB, 10 * n + d, d) for n, d in places]

        into = make("into", (4, 0), (8, 1))
        memsaver.pause("into")
        out = make("out", (8, 0), (4, 1))
        free = lambda: (sim.tag_bytes(0), sim.tag_bytes(1))
        assert free() == (8 * MIB, 4 * MIB)
        for _ in range(2):
            report = memsaver.swap(out="out", into="into")
            assert free() == (4 * MIB, 8 * MIB), free()
            assert [c.device_bytes // MIB for c in report.changes] == [8, 4, 4, 8]
            assert all(b.is_intact() for b in into)
            memsaver.swap(out="into", into="out")
            assert free() == (8 * MIB, 4 * MIB) and all(b.is_intact() for b in out)
        only = make("only", (6, 1))  # nothing on device 0
        memsaver.pause("out")
        memsaver.swap(out="only", into="out")
        assert free() == (8 * MIB, 4 * MIB) and all(b.is_intact() for b in out)
        memsaver.swap(out="out", into="only")
        assert free() == (0, 6 * MIB) and all(b.is_intact() for b in only)
        sim.occupy(80 << 30, 0)  # device 0 refuses: device 1 is as before, too
        try:
            memsaver.swap(out="only", into="out")
            raise AssertionError("it did not fail")
        except memsaver.OutOfDeviceMemoryError:
            pass
        sim.occupy(0, 0)
        assert free() == (0, 6 * MIB) and all(b.is_intact() for b in only)
        memsaver.resume()
        assert all(b.is_intact() for b in out + into) and not sim.violations()
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


def test_the_error_of_a_swap_without_fitting_pages_gives_advice(run_python):
    done = run_python(
        """
        import memsaver
        from memsaver import simulator
        MIB = 1 << 20
        kept = []
        for name, mib in (("first", 16), ("second", 24)):
            with memsaver.region(name, backup="host"):
                kept.append(simulator.buffer(mib * MIB))
        memsaver.pause()
        with memsaver.region("trainer", backup="host"):
            kept.append(simulator.buffer(40 * MIB))
        try:
            memsaver.swap(out="trainer", into=("first", "second"))
        except memsaver.OutOfDeviceMemoryError as error:
            advice = "pausing one tag and then resuming the other needs less memory"
            assert advice in str(error), error
        else:
            raise SystemExit("it fits")
        memsaver.pause("trainer")
        memsaver.resume("first", "second")
        """,
        MEMSAVER_SIM_MEMORY="64MiB",
        MEMSAVER_SLAB_BYTES="2MiB",
    )
    assert done.stderr == ""
