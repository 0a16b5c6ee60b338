"""Tests recording: allocations, frees, transitions and the driver's memory in a timeline."""

import os
import threading
import time

import pytest

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C

MIB = 1 << 20


def of(rows, name):
    return [row for row in rows if row.tag == name]


def resident(rows, name):
    """Return a tag's resident bytes in chronological order, without repeated values."""
    line = []
    for row in of(rows, name):
        if not line or line[-1] != row.resident_bytes:
            line.append(row.resident_bytes)
    return line


def test_memory_of_a_tag_over_time(sim, tag, make_blocks, options):
    options(slab_bytes="2MiB", share_bytes="2MiB")
    name = tag()
    with memsaver.timeline() as t:
        blocks = make_blocks(name, [4 * MIB, 6 * MIB], backup="host")
        memsaver.pause(name)
        memsaver.resume(name)
        del blocks[0]
        inside = t.trace
    assert resident(t.samples, name) == [4 * MIB, 10 * MIB, 0, 10 * MIB, 6 * MIB]
    assert resident(inside.samples, name) == resident(t.samples, name)
    allocated = [row.allocated_bytes for row in of(t.samples, name)]
    assert (allocated[0], max(allocated), allocated[-1]) == (4 * MIB, 10 * MIB, 6 * MIB)
    times = [row.seconds for row in t.samples]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= t.trace.seconds
    assert t.dropped == 0 == t.trace.begin and t.trace.process == os.getpid()
    assert abs(t.trace.started - time.time()) < 60
    assert 0 < time.monotonic() - t.trace.clock < 60


def test_a_free_that_fails_half_way_matches_the_statistics(sim, tag, options):
    options(slab_bytes="2MiB", share_bytes="2MiB")
    name = tag()
    with memsaver.region(name):
        large = simulator.buffer(7 << 30)  # of several pieces
    with memsaver.timeline() as t:
        with (
            sim.fault("cuMemUnmap", nth=2),
            pytest.warns(memsaver.MemsaverWarning, match="not be released yet"),
        ):
            del large
            memsaver.stats()
        [row] = memsaver.stats()[name]
    assert 0 < row.resident_bytes < 7 << 30
    assert of(t.samples, name)[-1].resident_bytes == row.resident_bytes


def test_a_free_takes_its_retained_pages_out(sim, tag, make_blocks, options):
    options(slab_bytes="2MiB", share_bytes="2MiB")
    name = tag()
    blocks = make_blocks(name, [4 * MIB] * 3, backup="host")
    with memsaver.timeline() as t:
        sim.fail("cuMemUnmap", 1, nth=2)
        sim.fail("cuMemMap", 1, times=0)
        with pytest.raises(memsaver.DriverError, match="resume them"):
            memsaver.pause(name)
        sim.clear_faults()
        before = memsaver.stats()[name][0].resident_bytes
        del blocks[0]
        [row] = memsaver.stats()[name]
    assert 0 < row.resident_bytes < before
    assert of(t.samples, name)[-1].resident_bytes == row.resident_bytes


@pytest.mark.each_python
def test_each_transition_reports_its_result_and_its_caller(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [4 * MIB], backup="host") + make_blocks(second, [6 * MIB])
    with memsaver.timeline() as t:
        paused = memsaver.pause(first, second)
        resumed = memsaver.resume(first)
    done = [(row.kind, row.direction, row.tag, row.outcome) for row in t.transitions]
    assert done == [
        ("pause", "out", first, "done"),
        ("pause", "out", second, "done"),
        ("resume", "into", first, "done"),
    ]
    changes = [*paused.changes, *resumed.changes]
    for row, change in zip(t.transitions, changes, strict=True):
        assert (row.device_bytes, row.copied_bytes) == (change.device_bytes, change.copied_bytes)
        assert row.device == change.device == 0
        assert f"{__file__}:" in row.caller and "test_each_transition" in row.caller
        assert row.thread == threading.get_native_id()
        assert 0 <= row.begin_seconds < row.end_seconds <= t.trace.seconds
    assert t.transitions[0].number == t.transitions[1].number < t.transitions[2].number
    assert t.transitions[0].end_seconds <= t.transitions[2].begin_seconds
    took = memsaver.stats()[first][0].last_pause_seconds
    assert t.transitions[0].seconds == pytest.approx(took, abs=0.1)
    memsaver.resume(second)
    assert blocks[0].is_intact()


def test_a_swap_has_two_directions_and_one_number(sim, tag, make_blocks):
    going, coming = tag("going"), tag("coming")
    blocks = make_blocks(coming, [4 * MIB], backup="host")
    memsaver.pause(coming)
    blocks += make_blocks(going, [6 * MIB], backup="host")
    with memsaver.timeline() as t:
        memsaver.swap(out=going, into=coming)
    out, into = t.transitions
    assert (out.kind, out.direction, out.tag, out.copied_bytes) == ("swap", "out", going, 6 * MIB)
    assert (into.kind, into.direction, into.tag) == ("swap", "into", coming)
    assert out.number == into.number
    assert resident(t.samples, going) == [6 * MIB, 0]
    assert resident(t.samples, coming) == [0, 4 * MIB]
    assert len(blocks) == 2


@pytest.mark.parametrize("way", ["pause", "resume", "swap"])
def test_a_failed_transition_is_recorded_as_failed(sim, tag, make_blocks, way):
    name, other = tag(), tag("other")
    blocks = make_blocks(name, [4 * MIB], backup="host")
    if way != "pause":
        memsaver.pause(name)
    blocks += make_blocks(other, [2 * MIB])
    calls = {
        "pause": lambda: memsaver.pause(name),
        "resume": lambda: memsaver.resume(name),
        "swap": lambda: memsaver.swap(out=other, into=name),
    }
    with memsaver.timeline() as t:
        with sim.fault("cuMemUnmap" if way == "pause" else "cuMemCreate", 2, times=0):
            with pytest.raises(memsaver.MemsaverError):
                calls[way]()
        calls[way]()
    failed = [row for row in t.transitions if row.outcome == "failed"]
    done = [row for row in t.transitions if row.outcome == "done"]
    assert {row.tag for row in failed} == {row.tag for row in done}
    assert {row.direction for row in failed} == {row.direction for row in done}
    assert all(row.device_bytes == row.copied_bytes == 0 for row in failed)
    assert all("test_timeline.py:" in row.caller for row in failed)
    assert max(row.end_seconds for row in failed) <= min(row.begin_seconds for row in done)
    assert len(blocks) == 2


def test_transitions_in_progress_and_cancelled_ones(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [4 * MIB], backup="host")
    with memsaver.timeline() as t:
        begun = _C.begin([name], [], -1, [])
        (row,) = t.transitions
        assert (row.outcome, row.end_seconds, row.seconds) == ("under way", None, None)
        begun.give_up()
        (row,) = t.transitions
        assert row.outcome == "given up" and row.seconds >= 0
    assert memsaver.stats()[name][0].failures == 0 and blocks[0].is_intact()


def test_a_begin_before_the_recording(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [4 * MIB], backup="host")
    begun = _C.begin([name], [], -1, [])
    with memsaver.timeline() as t:
        begun.run()
    (row,) = t.transitions
    assert (row.begin_seconds, row.outcome, row.direction) == (None, "done", "out")
    assert row.device_bytes == 4 * MIB and row.seconds is None
    memsaver.resume(name)
    assert blocks[0].is_intact()


def test_memory_from_before_and_the_drivers_figures_are_recorded(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [4 * MIB])
    with memsaver.timeline() as t:
        before = memsaver.device_memory(0)
        memsaver.pause(name)
        between = memsaver.device_memory(0)
        memsaver.resume(name)
    free = [row.free_bytes for row in t.memory if row.device == 0]
    assert free == [*[before[0]] * 2, *[between[0]] * 2, *[before[0]] * 2]
    assert {row.total_bytes for row in t.memory} == {before[1]}
    assert between[0] - before[0] == 4 * MIB == blocks[0].nbytes
    first = of(t.samples, name)[0]
    assert first.resident_bytes == first.allocated_bytes == 4 * MIB and first.seconds < 1


def test_an_interval_shows_other_processes_memory(sim, tag, make_blocks, wait_until):
    name = tag()
    blocks = make_blocks(name, [4 * MIB])
    before = memsaver.device_memory(0)[0]
    with memsaver.timeline(interval=0.002) as t:
        sim.occupy(64 * MIB)
        wait_until(lambda: any(row.free_bytes == before - 64 * MIB for row in t.memory))
        sim.occupy(0)
        wait_until(lambda: t.memory[-1].free_bytes == before)
    held = len(t.memory)
    time.sleep(0.01)
    assert len(t.memory) == held and len(blocks) == 1


def test_the_oldest_events_make_place_and_are_counted(sim, tag, make_blocks):
    quiet, busy = tag("quiet"), tag("busy")
    early = make_blocks(quiet, [2 * MIB])
    with memsaver.timeline(events=8) as t:
        late = make_blocks(quiet, [4 * MIB])  # the event is dropped later, its bytes are kept
        for _ in range(30):
            make_blocks(busy, [2 * MIB])
    # 1 + 30 allocations, 30 frees, and the driver's figures at the beginning and the end.
    assert t.dropped == 1 + 30 + 30 + 2 - 8
    assert [row.resident_bytes for row in of(t.samples, quiet)] == [6 * MIB]
    assert of(t.samples, quiet)[0].seconds == t.trace.begin == t.samples[0].seconds > 0
    assert len(of(t.samples, busy)) <= 8 and of(t.samples, busy)[-1].resident_bytes == 0
    assert len(early) + len(late) == 2


def test_a_process_has_one_timeline_at_a_time(sim, tag):
    with memsaver.timeline() as t:
        with pytest.raises(memsaver.InvalidStateError, match="already"):
            memsaver.timeline().start()
        with pytest.raises(memsaver.InvalidStateError, match="already"):
            t.start()
    t.stop()  # no effect
    with memsaver.timeline() as other:
        pass
    assert other.trace.samples is not t.trace.samples


@pytest.mark.parametrize("interval", [None, 0.01])
def test_a_deleted_timeline_stops_its_recording(sim, tag, make_blocks, interval):
    lost = memsaver.timeline(interval=interval)
    lost.start()
    threads = [thread for thread in threading.enumerate() if "timeline" in thread.name]
    assert len(threads) == (interval is not None)
    del lost
    name = tag()
    with memsaver.timeline() as t:
        blocks = make_blocks(name, [2 * MIB])
    assert resident(t.samples, name)[-1] == 2 * MIB and blocks
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.each_python
def test_it_is_over_after_an_exception_and_may_record_again(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    t = memsaver.timeline(interval=0.01)
    for name in (first, second):
        with pytest.raises(ZeroDivisionError), t:
            make_blocks(name, [2 * MIB])
            raise ZeroDivisionError
        assert resident(t.samples, name) == [2 * MIB, 0]
    assert not [row for row in of(t.samples, first) if row.resident_bytes]


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("events", [0, -1, 1.5, True, "many", (1 << 24) + 1]),
        ("interval", [0, -1.0, float("nan"), float("inf"), 1e12, True, "x", "1", [1]]),
    ],
)
def test_invalid_options_are_rejected(option, values):
    for wrong in values:
        with pytest.raises(memsaver.ConfigError, match=f"{option} must be"):
            memsaver.timeline(**{option: wrong})


@pytest.mark.parametrize("failure", [RuntimeError("can't start new thread"), MemoryError()])
def test_without_a_thread_nothing_is_recorded(sim, monkeypatch, failure):
    def refuse(self):
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(memsaver.OutOfHostMemoryError, match="without an interval"):
            memsaver.timeline(interval=1).start()
    with memsaver.timeline(interval=1):
        pass


def test_nothing_recorded_is_an_error(sim):
    with pytest.raises(memsaver.InvalidStateError, match="has recorded nothing"):
        _ = memsaver.timeline().trace
    for call in (_C.timeline_read, _C.timeline_stop):
        with pytest.raises(memsaver.InvalidStateError, match="start one first"):
            call()
    _C.timeline_sample()  # no effect and no error
    for wrong in (0, (1 << 24) + 1):
        with pytest.raises(memsaver.MemsaverError, match="16777216"):
            _C.timeline_start(wrong)
    with memsaver.timeline(events=1):
        pass


def test_a_long_caller_keeps_its_end(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [2 * MIB])
    text = "/" + "ä" * 300 + "/train.py:120 in sleep"
    with memsaver.timeline() as t:
        begun = _C.begin([name], [], -1, [])
        begun.set_caller(text.encode())
        begun.run()
    caller = t.transitions[0].caller
    assert len(caller.encode()) in (254, 255) and text.endswith(caller)
    assert len(blocks) == 1


@pytest.mark.each_python
def test_many_threads_allocate_while_one_reads(sim, tag, make_blocks, in_thread):
    names = [tag() for _ in range(4)]

    def work(name):
        for _ in range(10):
            make_blocks(name, [2 * MIB])

    with memsaver.timeline() as t:
        tasks = [in_thread(work, name) for name in names]
        while any(task.is_alive() for task in tasks):
            read = t.trace
            assert read.dropped == 0 and len(of(read.samples, names[0])) <= 20
        for task in tasks:
            task.result()
    for name in names:
        line = resident(t.samples, name)
        assert line[-1] == 0 and set(line) == {0, 2 * MIB}
        assert line.count(2 * MIB) == 10


def test_two_devices_each_have_their_lines(run_python):
    run_python(
        """
        import memsaver
        from memsaver import simulator

        MIB = 1 << 20
        with memsaver.timeline() as t:
            with memsaver.region("t", backup="host"):
                held = [simulator.buffer(4 * MIB, 0), simulator.buffer(6 * MIB, 1)]
            memsaver.pause("t")
        assert t.trace.devices == (0, 1)
        assert [(r.device, r.device_bytes) for r in t.transitions] == [(0, 4 * MIB), (1, 6 * MIB)]
        for device, nbytes in ((0, 4 * MIB), (1, 6 * MIB)):
            free = [row.free_bytes for row in t.memory if row.device == device]
            assert free[-1] - free[0] == nbytes, free
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


def test_recording_opens_no_driver_by_itself(run_python):
    run_python(
        """
        import os, memsaver
        with memsaver.timeline(interval=0.001) as t:
            child = os.fork()
            if child == 0:  # it may use memsaver: nothing has opened the driver
                from memsaver import simulator
                with memsaver.region("t"):
                    held = simulator.buffer(1 << 20)
                os._exit(0 if t.samples[-1].resident_bytes == 2 << 20 else 1)
            assert os.waitpid(child, 0)[1] == 0
        assert t.samples == () and t.memory == () and t.transitions == ()
        """
    )


@pytest.mark.each_python
def test_a_forked_child_may_leave_the_recording(run_python):
    run_python(
        """
        import os, memsaver
        for opened in (False, True):
            if opened:
                memsaver.device_memory(0)
            with memsaver.timeline(interval=0.001) as t:
                child = os.fork()
            if child == 0:
                try:
                    t.trace
                except memsaver.InvalidStateError:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert t.trace.process == os.getpid()
        """
    )


@pytest.mark.each_python
def test_a_process_may_end_while_it_records(run_python):
    done = run_python(
        """
        import memsaver
        from memsaver import simulator
        t = memsaver.timeline(interval=0.0005)
        t.start()
        with memsaver.region("t"):
            held = simulator.buffer(1 << 20)
        """
    )
    assert done.stderr == ""
