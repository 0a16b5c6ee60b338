"""Transitions in the background: handles, streams, progress, who waits for whom, swap, trim."""

import contextlib
import gc
import threading
import time
import warnings

import pytest

import memsaver
from memsaver.errors import ConfigError, InvalidStateError, MemsaverWarning, UnknownTagError

MIB = 1 << 20


@pytest.fixture
def registered():
    """Registrations of callbacks, removed at the end: `registered += [memsaver.on_pause(f)]`."""
    found = []
    yield found
    for registration in found:
        registration.remove()
    found.clear()  # pytest keeps the list, and with it what the callbacks refer to


@pytest.fixture
def make_paused(make_blocks):
    """A tag with a host backup, paused: its blocks."""

    def make(name, sizes=(2 * MIB,)):
        blocks = make_blocks(name, list(sizes), backup="host")
        memsaver.pause(name)
        return blocks

    return make


@contextlib.contextmanager
def held(sim):
    """No copy starts inside. Let go before a failing test frees its blocks, which would wait."""
    sim.hold_streams(True)
    try:
        yield
    finally:
        sim.hold_streams(False)


def intact(blocks):
    return all(b.is_intact() for b in blocks)


# --- the handle -----------------------------------------------------------------------------------


def test_the_caller_goes_on_during_a_resume(sim, tag, make_blocks, make_paused):
    name, other = tag("name"), tag("other")
    blocks = make_paused(name)
    others = make_blocks(other, [MIB])
    memsaver.pause(other)
    with held(sim):
        under_way = memsaver.resume(name, wait=False)
        assert memsaver.state(name) == "restoring"
        assert not under_way.done() and "under way" in repr(under_way)
        # Another tag meanwhile.
        assert memsaver.resume(other).bytes == 2 * MIB
        assert others[0].is_zero()
        assert memsaver.state(name) == "restoring" and not under_way.done()
    report = under_way.wait()
    assert under_way.done() and under_way.wait() is report
    assert report.changed == (name,) and report.copied_bytes == 2 * MIB
    assert memsaver.state(name) == "mapped" and intact(blocks)


def test_the_caller_goes_on_during_a_pause(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [2 * MIB], backup="host")
    with held(sim):
        under_way = memsaver.pause(name, wait=False)
        assert memsaver.state(name) == "saving" and not under_way.done()
        assert sim.tag_bytes() > 0
    assert under_way.wait().changed == (name,)
    assert memsaver.state(name) == "paused" and sim.tag_bytes() == 0
    memsaver.resume(name)
    assert intact(blocks)


def test_the_tags_are_taken_when_the_call_returns(sim, tag, make_blocks):
    # However late its thread is.
    name = tag()
    make_blocks(name, [MIB], backup="host")
    go = threading.Event()

    class Late(threading.Thread):
        def run(self):
            go.wait(10)
            super().run()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "Thread", Late)
        under_way = memsaver.pause(name, wait=False)
    assert memsaver.state(name) == "saving"
    go.set()
    under_way.wait()
    assert memsaver.state(name) == "paused"


def test_a_conflicting_call_of_the_same_thread_waits(sim, tag, make_blocks):
    name, other = tag("name"), tag("other")
    blocks = make_blocks(name, [MIB], backup="host") + make_blocks(other, [MIB], backup="host")
    sim.stream_delay(0.1)
    pause = memsaver.pause(name, other, wait=False)
    resume = memsaver.resume(other, wait=False)
    assert pause.done()
    assert memsaver.pause(other).changed == (other,)
    assert resume.done()
    assert memsaver.resume(name, other).changed == (name, other)
    assert intact(blocks)
    pause.wait(), resume.wait()


def test_a_conflicting_call_of_another_thread_waits(sim, tag, make_blocks, in_thread):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    with held(sim):
        pause = memsaver.pause(name, wait=False)
        task = in_thread(memsaver.resume, name)
        time.sleep(0.05)
        assert task.is_alive() and memsaver.state(name) == "saving"
    assert task.result().changed == (name,)
    assert pause.done() and intact(blocks)


def test_a_region_and_paused_wait_for_it(sim, tag, make_blocks, make_paused):
    name = tag()
    blocks = make_paused(name)
    sim.stream_delay(0.05)
    resume = memsaver.resume(name, wait=False)
    blocks += make_blocks(name, [MIB])
    assert resume.done()
    memsaver.pause(name, wait=False)
    with memsaver.paused(name) as report:
        assert report.changed == ()
    assert memsaver.state(name) == "paused"
    memsaver.resume(name)
    assert intact(blocks)


def test_a_handle_that_nobody_keeps(sim, tag, make_blocks, recwarn):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    sim.stream_delay(0.05)
    memsaver.pause(name, wait=False)
    gc.collect()
    memsaver.resume(name, wait=False)
    assert memsaver.resume(name).changed == ()
    assert intact(blocks)
    assert not [w for w in recwarn if issubclass(w.category, MemsaverWarning)]


def test_time_is_up(sim, tag, make_paused):
    blocks = make_paused(name := tag())
    with held(sim):
        under_way = memsaver.resume(name, wait=False)
        for timeout in (0, 0.02, -1):
            with pytest.raises(TimeoutError, match="it goes on"):
                under_way.wait(timeout)
    assert under_way.wait(10).changed == (name,)
    assert under_way.wait(0).changed == (name,)
    assert intact(blocks)


def test_the_report_has_the_transitions_own_duration(sim, tag, make_paused):
    blocks = make_paused(name := tag())
    sim.stream_delay(0.1)
    start = time.perf_counter()
    under_way = memsaver.resume(name, wait=False)
    while not under_way.done():
        time.sleep(0.01)
    took = time.perf_counter() - start
    time.sleep(0.2)
    assert 0.1 <= under_way.wait().seconds <= took
    assert intact(blocks)


def test_no_tags_and_nothing_to_do(run_python, sim, tag, make_blocks):
    name = tag()
    make_blocks(name, [MIB])
    report = memsaver.resume(name, wait=False).wait()
    assert report.changed == () and [c.tag for c in report.changes] == [name]
    run_python(
        """
        import memsaver
        under_way = memsaver.resume(wait=False)
        under_way.wait_stream(0)
        assert under_way.wait().changes == () and under_way.progress == (0, 0)
        """
    )


def test_as_many_threads_as_there_may_be(sim, tag, make_blocks, monkeypatch):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    under_way = memsaver.pause(name, wait=False)
    assert under_way.done() and under_way.wait().changed == (name,)
    assert memsaver.resume(name, progress=lambda done, total: None).changed == (name,)
    assert intact(blocks) and memsaver.trim().wait() > 0


# --- errors ---------------------------------------------------------------------------------------


def test_errors_are_delivered_by_wait(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    with sim.fault("cuMemUnmap"):
        pause = memsaver.pause(name, wait=False)
        for _ in range(2):
            with pytest.raises(memsaver.DriverError, match="cuMemUnmap"):
                pause.wait()
    assert pause.done() and memsaver.state(name) == "mapped" and intact(blocks)
    memsaver.pause(name)
    with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
        resume = memsaver.resume(name, wait=False)
        with pytest.raises(memsaver.OutOfDeviceMemoryError) as caught:
            resume.wait()
    assert caught.value.needed > 0
    assert memsaver.state(name) == "paused" and sim.tag_bytes() == 0
    memsaver.resume(name, wait=False).wait()
    assert intact(blocks)


def test_what_is_refused_at_once(sim, tag, make_blocks):
    name = tag()
    make_blocks(name, [MIB])
    for call in (memsaver.pause, memsaver.resume):
        with pytest.raises(UnknownTagError):
            call(name + "x", wait=False)
        with pytest.raises(ConfigError, match="progress"):
            call(name, wait=False, progress=5)
    with memsaver.region(name):
        with pytest.raises(InvalidStateError, match="region"):
            memsaver.pause(name, wait=False)
    assert memsaver.state(name) == "mapped"
    under_way = memsaver.pause(name, wait=False)
    for bad in ("0", 1.5, object(), True):
        with pytest.raises(ConfigError, match="wait_stream"):
            under_way.wait_stream(bad)
    under_way.wait()


@pytest.mark.parametrize("when", ["after the end", "before the end"])
def test_an_error_that_nobody_collects_is_a_warning(sim, tag, make_blocks, wait_until, when):
    name = tag("forgotten")
    blocks = make_blocks(name, [MIB], backup="host")
    sim.fail("cuMemUnmap", 1)
    with pytest.warns(MemsaverWarning, match="the pause of .*nobody.*cuMemUnmap") as caught:
        if when == "before the end":
            sim.stream_delay(0.05)
        under_way = memsaver.pause(name, wait=False)
        if when == "after the end":
            wait_until(under_way.done)
        del under_way
        gc.collect()
        wait_until(lambda: bool(caught))
    assert len(caught) == 1 and repr(name) in str(caught[0].message)
    assert memsaver.state(name) == "mapped" and intact(blocks)


def test_an_error_that_was_collected_is_no_warning(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    for collect in (lambda h: h.wait(), lambda h: h.wait_stream(0)):
        sim.fail("cuMemUnmap", 1)
        under_way = memsaver.pause(name, wait=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(memsaver.DriverError, match="cuMemUnmap"):
                collect(under_way)
            del under_way
            gc.collect()
    assert intact(blocks)


# --- streams --------------------------------------------------------------------------------------


class TorchStream:
    def __init__(self, stream):
        self.cuda_stream = stream.value


@pytest.mark.parametrize("form", [lambda s: s.value, TorchStream], ids=["address", "object"])
def test_a_streams_work_runs_after_the_copies(sim, tag, make_paused, form):
    (block,) = make_paused(name := tag())
    with sim.stream() as stream:
        with held(sim):
            under_way = memsaver.resume(name, wait=False)
            under_way.wait_stream(form(stream))  # returns, though no copy has run
            assert not under_way.done()
            sim.memset(block.address, 7, block.nbytes, stream)
        under_way.wait()
        assert sim.opened.cuStreamSynchronize(stream) == 0
    assert block.bytes() == bytes([7]) * block.nbytes


def test_a_stream_waits_for_a_transition_that_is_over(sim, tag, make_paused):
    (block,) = make_paused(name := tag())
    under_way = memsaver.resume(name, wait=False)
    under_way.wait()
    with sim.stream() as stream:
        under_way.wait_stream(stream.value)
        sim.memset(block.address, 7, block.nbytes, stream)
    assert block.bytes() == bytes([7]) * block.nbytes


def test_waiting_on_a_stream_for_what_fails(sim, tag, make_paused):
    (block,) = make_paused(name := tag())
    with sim.stream() as stream:
        with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
            under_way = memsaver.resume(name, wait=False)
            with pytest.raises(memsaver.OutOfDeviceMemoryError):
                under_way.wait_stream(stream.value)
    memsaver.resume(name)
    assert block.is_intact()


# --- progress -------------------------------------------------------------------------------------


class Progress(list):
    def __call__(self, done, total):
        self.append((done, total))
        self.threads = [*getattr(self, "threads", []), threading.current_thread()]


@pytest.mark.parametrize("kind", ["pause", "resume", "swap"])
def test_progress_is_told_on_the_calling_thread(sim, tag, make_blocks, make_paused, kind):
    name, other = tag("name"), tag("other")
    out, into = make_blocks(name, [4 * MIB] * 4, backup="host"), make_paused(other, [4 * MIB] * 4)
    sim.copy_rate(50 * MIB)
    told = Progress()
    calls = {
        "pause": lambda: memsaver.pause(name, progress=told),
        "resume": lambda: memsaver.resume(other, progress=told),
        "swap": lambda: memsaver.swap(out=name, into=other, progress=told),
    }
    report = calls[kind]()
    sim.copy_rate(0)
    assert report.seconds > 0.25
    assert len(told) >= 4, "about every 50 ms"
    assert set(told.threads) == {threading.current_thread()}
    done = [d for d, _ in told]
    assert done == sorted(done) and all(d <= t for d, t in told if t)
    assert told[-1] == (report.copied_bytes, report.copied_bytes)
    assert report.copied_bytes == (32 if kind == "swap" else 16) * MIB
    memsaver.resume(name, other)
    assert intact(out) and intact(into)


def test_progress_of_a_handle(sim, tag, make_paused):
    blocks = make_paused(name := tag(), [2 * MIB] * 4)
    told = Progress()
    with held(sim):
        under_way = memsaver.resume(name, wait=False, progress=told)
        with pytest.raises(TimeoutError):
            under_way.wait(0.12)
        assert 2 <= len(told) <= 4 and told[-1][0] == 0
        assert under_way.progress[0] == 0
    under_way.wait()
    assert told[-1] == under_way.progress == (8 * MIB, 8 * MIB)
    count = len(told)
    under_way.wait()
    assert len(told) == count, "the end is told once"
    assert set(told.threads) == {threading.current_thread()} and intact(blocks)


def test_a_bar_is_for_terminals_only(sim, tag, make_paused, capfd):
    blocks = make_paused(name := tag())
    memsaver.resume(name, progress=True)
    memsaver.pause(name, progress=True, wait=False).wait()
    memsaver.resume(name, progress=False)
    assert capfd.readouterr() == ("", "")
    assert intact(blocks)


def test_a_progress_callback_that_raises(sim, tag, make_blocks):
    # The transition is over when the exception arrives.
    name = tag()
    blocks = make_blocks(name, [2 * MIB], backup="host")
    sim.stream_delay(0.15)
    calls = []

    def fail(done, total):
        calls.append(done)
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        memsaver.pause(name, progress=fail)
    assert len(calls) == 1 and memsaver.state(name) == "paused"
    under_way = memsaver.resume(name, wait=False, progress=fail)
    with pytest.raises(LookupError, match="no more"):
        under_way.wait()
    assert under_way.done() and memsaver.state(name) == "mapped" and intact(blocks)


def test_a_progress_callback_that_raises_while_the_transition_fails(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [2 * MIB], backup="host")
    sim.stream_delay(0.15)
    sim.fail("cuMemUnmap", 1)

    def fail(done, total):
        raise LookupError("no more")

    with pytest.raises(memsaver.DriverError) as caught:
        memsaver.pause(name, progress=fail)
    assert isinstance(caught.value.__context__, LookupError)
    assert memsaver.state(name) == "mapped" and intact(blocks)


def test_a_progress_callback_may_start_transitions(sim, tag, make_blocks, make_paused):
    name, other = tag("name"), tag("other")
    blocks = make_blocks(name, [2 * MIB], backup="host") + make_paused(other)
    sim.stream_delay(0.15)
    started = []

    def callback(done, total):
        assert memsaver.stats().resident_bytes >= 0
        if not started:
            started.append(memsaver.resume(other, wait=False))
            memsaver.resume(name)  # the very tag: waits for the pause, and undoes it
            assert memsaver.state(name) == "mapped"

    assert memsaver.pause(name, progress=callback).changed == (name,)
    assert started[0].wait().changed == (other,)
    assert memsaver.state(name) == "mapped" and intact(blocks)


# --- callbacks ------------------------------------------------------------------------------------


def test_callbacks_and_their_threads(sim, tag, make_blocks, registered):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    seen = []

    def note(what):
        return lambda t: seen.append((what, threading.current_thread().name, memsaver.state(t)))

    registered += [memsaver.on_pause(note("pause"), name), memsaver.on_resume(note("resume"), name)]
    main = threading.current_thread().name
    memsaver.pause(name, wait=False).wait()
    memsaver.resume(name, wait=False).wait()
    assert seen == [("pause", main, "mapped"), ("resume", "memsaver-resume", "mapped")]
    seen.clear()
    with sim.fault("cuMemUnmap"):
        with pytest.raises(memsaver.DriverError):
            memsaver.pause(name, wait=False).wait()
    assert seen == [("pause", main, "mapped"), ("resume", "memsaver-pause", "mapped")]
    assert intact(blocks)


def test_a_tag_is_taken_until_its_callbacks_are_over(sim, tag, make_paused, registered):
    make_paused(name := tag())
    inside, order = threading.Event(), []

    def slow(t):
        inside.set()
        time.sleep(0.1)
        order.append(memsaver.state(t))

    registered.append(memsaver.on_resume(slow, name))
    under_way = memsaver.resume(name, wait=False)
    assert inside.wait(10)
    memsaver.pause(name)
    order.append("paused")
    assert order == ["mapped", "paused"] and under_way.done()


def test_a_callback_that_raises_in_the_background(sim, tag, make_paused, registered):
    blocks = make_paused(name := tag())

    def fail(t):
        raise LookupError(t)

    registered.append(memsaver.on_resume(fail, name))
    under_way = memsaver.resume(name, wait=False)
    with pytest.raises(LookupError, match=name):
        under_way.wait()
    assert memsaver.state(name) == "mapped" and intact(blocks)
    registered.pop().remove()
    memsaver.pause(name)  # the tag is free again


def test_a_callback_in_the_background_may_start_transitions(
    sim, tag, make_blocks, make_paused, registered
):
    name, other, third = tag("name"), tag("other"), tag("third")
    blocks = make_paused(name) + make_paused(other) + make_blocks(third, [MIB], backup="host")
    started = []

    def more(t):
        registered.pop().remove()
        memsaver.resume(other)
        with memsaver.paused(third):
            pass
        with memsaver.paused(name):  # its own
            pass
        started.append(memsaver.pause(other, wait=False))

    registered.append(memsaver.on_resume(more, name))
    memsaver.resume(name, wait=False).wait()
    assert started[0].wait().changed == (other,)
    assert memsaver.state(name) == memsaver.state(third) == "mapped"
    memsaver.resume(other)
    assert intact(blocks)


def test_a_callback_cannot_wait_for_its_own_transition(sim, tag, make_paused, registered):
    blocks = make_paused(name := tag())
    handles, errors = [], []
    ready = threading.Event()

    def wait_for_itself(t):
        ready.wait(10)
        handles[0].wait_stream(0)  # the copies are done: nothing to wait for
        with pytest.raises(InvalidStateError, match="after the callback") as caught:
            handles[0].wait()
        errors.append(caught.value)

    registered.append(memsaver.on_resume(wait_for_itself, name))
    handles.append(memsaver.resume(name, wait=False))
    ready.set()
    handles[0].wait()
    assert len(errors) == 1 and intact(blocks)


def test_two_callbacks_that_want_each_others_tags(sim, tag, make_blocks, registered, in_thread):
    # One of the two is refused, the other then goes on.
    names = [tag("first"), tag("second")]
    blocks = [make_blocks(name, [MIB], backup="host")[0] for name in names]
    both = threading.Barrier(2)
    refused = []

    def cross(mine, theirs):
        def callback(t):
            both.wait(10)
            try:
                memsaver.pause(theirs)
            except InvalidStateError as error:
                refused.append((mine, str(error)))

        return memsaver.on_pause(callback, mine)

    registered += [cross(*names), cross(*names[::-1])]
    # The callback of a further pause would meet the barrier a second time.
    original, registered[:] = list(registered), []
    tasks = [in_thread(memsaver.pause, name) for name in names]
    try:
        both_done = [task.result(20) for task in tasks]
    finally:
        for registration in original:
            registration.remove()
    assert len(both_done) == 2 and len(refused) >= 1
    assert all("waits for this thread" in text for _, text in refused)
    memsaver.resume(*names)
    assert intact(blocks)


def test_a_callback_that_waits_for_a_transition_that_waits_for_it(
    sim, tag, make_blocks, make_paused, registered
):
    # on_pause(first) waits for the resume of the second, whose callback wants the first.
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB], backup="host") + make_paused(second)
    registered.append(memsaver.on_resume(lambda t: memsaver.pause(first), second))
    refused = []

    def callback(t):
        under_way = memsaver.resume(second, wait=False)
        with pytest.raises(InvalidStateError):
            under_way.wait()
            refused.append("its callback")
        refused.append("the wait")

    registered.append(memsaver.on_pause(callback, first))
    memsaver.pause(first)
    assert refused
    assert memsaver.state(first) == "paused" and memsaver.state(second) == "mapped"
    memsaver.resume(first)
    assert intact(blocks)


def test_eight_threads_in_the_background(sim, tag, make_blocks, in_thread):
    names = [tag(f"t{i}") for i in range(4)]
    blocks = [make_blocks(name, [100_000], backup="host")[0] for name in names]

    def work(seed):
        for turn in range(15):
            some = names[(seed + turn) % 4 :] or names
            memsaver.pause(*some, wait=False)
            resume = memsaver.resume(*some[::-1], wait=False)
            if turn % 3:
                resume.wait()
        memsaver.resume(*names)

    for task in [in_thread(work, seed) for seed in range(8)]:
        task.result()
    memsaver.resume(*names)
    assert intact(blocks)


# --- swap -----------------------------------------------------------------------------------------


def test_a_swap_is_a_pause_and_a_resume(sim, tag, make_blocks, make_paused, registered):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [4 * MIB], backup="host"), make_paused(second, [4 * MIB])
    events = []
    registered += [
        memsaver.on_pause(lambda t: events.append(("pause", t, str(memsaver.state(t))))),
        memsaver.on_resume(lambda t: events.append(("resume", t, str(memsaver.state(t))))),
    ]
    out, into, resident = first, second, sim.tag_bytes()
    for wait in (True, False, True):
        events.clear()
        for b in blocks[0 if out == first else 1]:
            b.fill(b.seed + 1000)  # what has not changed is not copied again
        report = memsaver.swap(out=out, into=[into], wait=wait)
        report = report if wait else report.wait()
        assert memsaver.state(out) == "paused" and memsaver.state(into) == "mapped"
        assert events == [("pause", out, "mapped"), ("resume", into, "mapped")]
        assert report.changed == (out, into)
        assert report.copied_bytes == 8 * MIB and report.bytes == 8 * MIB
        assert [c.device_bytes for c in report.changes] == [4 * MIB] * 2
        assert sim.tag_bytes() == resident
        assert intact(blocks[0 if into == first else 1])
        out, into = into, out
    memsaver.resume(first, second)
    assert intact(blocks[0]) and intact(blocks[1])


def test_a_swap_overrides_the_backup_and_leaves_alone_what_is_there(
    sim, tag, make_blocks, make_paused
):
    first, second, third, fourth = (tag(str(i)) for i in range(4))
    gone = make_blocks(first, [MIB], backup="host")
    kept = make_paused(second) + make_blocks(third, [MIB], backup="host") + make_paused(fourth)
    report = memsaver.swap(out=[first, second], into=(third, fourth), backup="none")
    assert report.changed == (first, fourth)
    assert {c.tag for c in report.changes} == {first, second, third, fourth}
    states = [str(memsaver.state(name)) for name in (first, second, third, fourth)]
    assert states == ["paused", "paused", "mapped", "mapped"]
    memsaver.resume(first, second)
    assert gone[0].is_zero() and intact(kept)


def test_a_swap_that_fails_changes_nothing(sim, tag, make_blocks, make_paused, registered):
    first, second = tag("first"), tag("second")
    out, into = make_blocks(first, [4 * MIB], backup="host"), make_paused(second, [16 * MIB])
    events = []
    registered += [
        memsaver.on_pause(lambda t: events.append(("pause", t))),
        memsaver.on_resume(lambda t: events.append(("resume", t))),
    ]
    sim.occupy(80 << 30)
    for wait in (True, False):
        with pytest.raises(memsaver.OutOfDeviceMemoryError):
            result = memsaver.swap(out=first, into=second, wait=wait)
            result.wait()
        assert memsaver.state(first) == "mapped" and memsaver.state(second) == "paused"
        assert intact(out)
    sim.occupy(0)
    assert events == [("pause", first), ("resume", first)] * 2
    memsaver.resume(second)
    assert intact(into)


def test_what_cannot_be_swapped(sim, tag, make_blocks, registered):
    first, second = tag("first"), tag("second")
    make_blocks(first, [MIB]), make_blocks(second, [MIB])
    told = []
    registered.append(memsaver.on_pause(told.append))
    for out, into, error in (
        ([], second, ConfigError),
        (first, (), ConfigError),
        (first, [second, first], ConfigError),
        (first, second + "x", UnknownTagError),
        (first + "x", second, UnknownTagError),
        (first, 5, TypeError),
        (first, "", ConfigError),
    ):
        with pytest.raises(error):
            memsaver.swap(out=out, into=into)
    with pytest.raises(ConfigError, match="no backup"):
        memsaver.swap(out=first, into=second, backup="moon")
    assert told == [] and memsaver.state(first) == "mapped"


# --- trim -----------------------------------------------------------------------------------------


def test_trim_goes_on_in_the_background(sim, tag, make_paused):
    make_paused(name := tag(), [2 * MIB])
    memsaver.trim(wait=True)
    assert memsaver.trim().wait() == 0
    memsaver.resume(name)
    held = memsaver.stats()[name][0].host_bytes
    assert held >= 2 * MIB and memsaver.stats().host_bytes >= held
    trim = memsaver.trim()
    assert trim.wait(10) == held and trim.done()
    assert memsaver.stats()[name][0].host_bytes == 0


def test_a_trim_from_a_held_device_returns_at_once(sim, tag, make_paused):
    # Unpinning waits for the device's work.
    make_paused(name := tag(), [2 * MIB])
    memsaver.resume(name)
    with sim.stream() as stream, memsaver.region(name):
        scratch = memsaver.simulator.buffer(MIB)
        with held(sim):
            sim.memset(scratch.address, 1, MIB, stream)
            trim = memsaver.trim()
            with pytest.raises(TimeoutError):
                trim.wait(0.05)
        assert trim.wait(10) > 0
    del scratch


# --- processes ------------------------------------------------------------------------------------

START = """
    import gc, os, signal, sys, threading, time
    import memsaver
    from simulated_driver import Block, Simulator

    sim = Simulator()
    with memsaver.region("t", backup="host"):
        block = Block(sim, 3 << 20, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test run inherited
"""


def test_exit_waits_for_a_transition(run_python):
    done = run_python(
        START
        + """
    sim.stream_delay(0.3)
    memsaver.on_resume(lambda tag: print("resumed", block.is_intact(), flush=True))
    memsaver.pause("t", wait=False)
    kept = memsaver.resume("t", wait=False)
    print("end", flush=True)
    """
    )
    assert (done.stdout, done.stderr) == ("end\nresumed True\n", "")


def test_exit_with_a_transition_that_fails(run_python):
    done = run_python(
        START
        + """
    sim.stream_delay(0.2)
    sim.fail("cuMemUnmap", 1)
    kept = memsaver.pause("t", wait=False)
    print("end", flush=True)
    """
    )
    assert done.stdout == "end\n"
    assert "MemsaverWarning: the pause of 't' failed" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_an_interrupt_leaves_the_transition_running(run_python):
    run_python(
        START
        + """
    nothing = lambda done, total: None
    for call in (
        lambda: memsaver.pause("t", wait=False).wait(),
        lambda: memsaver.pause("t", progress=nothing),
        lambda: memsaver.pause("t", wait=False, progress=nothing).wait(),
    ):
        block.fill(block.seed + 1)
        sim.stream_delay(0.4)
        timer = threading.Timer(0.08, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        try:
            call()
        except KeyboardInterrupt:
            assert time.monotonic() - start < 0.35
        else:
            raise AssertionError("no interrupt")
        assert memsaver.state("t") == "saving"
        sim.stream_delay(0)
        assert memsaver.resume("t").changed == ("t",)
        assert block.is_intact()
    """
    )


def test_a_forked_child_cannot_wait(run_python):
    done = run_python(
        START
        + """
    sim.stream_delay(0.3)
    under_way = memsaver.pause("t", wait=False)
    child = os.fork()
    if child == 0:
        try:
            under_way.wait()
        except memsaver.InvalidStateError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    under_way.wait()
    memsaver.resume("t")
    assert block.is_intact()
    """
    )
    assert done.stderr == ""


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_a_gpu():
    torch = pytest.importorskip("torch")
    names = ["async.first", "async.second"]
    tensors = []
    for name in names:
        with memsaver.region(name, backup="host"):
            tensors.append(torch.randint(0, 255, (256 * MIB,), dtype=torch.uint8, device="cuda"))
    copies = [tensor.clone() for tensor in tensors]
    before = [memsaver.fingerprint(tensor) for tensor in tensors]
    memsaver.pause(*names, wait=False).wait()
    under_way = memsaver.resume(names[0], wait=False)
    stream = torch.cuda.Stream()
    under_way.wait_stream(stream)
    with torch.cuda.stream(stream):
        same = torch.equal(tensors[0], copies[0])
    assert same
    under_way.wait()
    told = []
    report = memsaver.swap(
        out=names[0], into=names[1], progress=lambda done, total: told.append((done, total))
    )
    assert report.changed == tuple(names) and told[-1][0] == told[-1][1]
    assert torch.equal(tensors[1], copies[1])
    memsaver.resume(*names)
    assert [memsaver.fingerprint(tensor) for tensor in tensors] == before
    assert memsaver.fingerprint(*names) == memsaver.fingerprint(*tensors)
    tensors.clear()
    torch.cuda.empty_cache()
    memsaver.trim(wait=True)


# --- who does not wait ----------------------------------------------------------------------------


def test_a_free_in_a_tag_that_does_not_change_does_not_wait(sim, tag, make_blocks):
    busy, idle = tag("busy"), tag("idle")
    blocks = make_blocks(busy, [3 * MIB], backup="host")
    others = make_blocks(idle, [MIB])
    memsaver.pause(idle)
    with held(sim):
        pause = memsaver.pause(busy, idle, wait=False)
        others.clear()
        gc.collect()
        assert memsaver.ranges(idle) == ()
        assert not pause.done()
    assert [(c.tag, c.changed) for c in pause.wait().changes] == [(busy, True), (idle, False)]
    memsaver.resume(busy, idle)
    assert intact(blocks)


def test_a_stream_waits_on_a_thread_without_a_context(sim, tag, make_paused, in_thread):
    name = tag()
    blocks = make_paused(name)
    with held(sim):
        resume = memsaver.resume(name, wait=False)
        assert in_thread(lambda: resume.wait_stream(0)).result() is None
        assert not resume.done()
    resume.wait()
    assert intact(blocks)


def test_a_callback_of_a_failed_transition_may_ask_for_it(sim, tag, make_blocks, registered):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    met = []

    def ask(_):
        with pytest.raises(InvalidStateError):
            handle.wait_stream(0)
        met.append("told")

    with sim.fault("cuMemcpyDtoHAsync"):
        with held(sim):
            handle = memsaver.pause(name, wait=False)
            registered.append(memsaver.on_resume(ask, tag=name))
        with pytest.raises(memsaver.MemsaverError):
            handle.wait(20)
    assert met == ["told"] and memsaver.state(name) == "mapped"
    assert intact(blocks)
