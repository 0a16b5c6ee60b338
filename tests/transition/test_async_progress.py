"""Tests the progress that transitions report to callbacks and through handles."""

import threading
import time

import pytest
from looks import held, intact

import memsaver

pytestmark = pytest.mark.each_python

MIB = 1 << 20


class Progress(list):
    def __call__(self, done, total):
        self.append((done, total))
        self.threads = [*getattr(self, "threads", []), threading.current_thread()]


@pytest.mark.parametrize("kind", ["pause", "resume", "swap"])
def test_progress_is_reported_on_the_calling_thread(sim, tag, make_blocks, make_paused, kind):
    name, other = tag("name"), tag("other")
    out, into = make_blocks(name, [4 * MIB] * 4, backup="host"), make_paused(other, [4 * MIB] * 4)
    sim.copy_rate(25 * MIB)
    told = Progress()
    calls = {
        "pause": lambda: memsaver.pause(name, progress=told),
        "resume": lambda: memsaver.resume(other, progress=told),
        "swap": lambda: memsaver.swap(out=name, into=other, progress=told),
    }
    report = calls[kind]()
    sim.copy_rate(0)
    assert report.seconds > 0.5
    assert 4 <= len(told) <= report.seconds / 0.05 + 2, "about every 50 ms"
    assert set(told.threads) == {threading.current_thread()}
    done = [d for d, _ in told]
    assert done == sorted(done) and all(d <= t for d, t in told if t)
    assert told[-1] == (report.copied_bytes, report.copied_bytes)
    assert report.copied_bytes == (32 if kind == "swap" else 16) * MIB
    memsaver.resume(name, other)
    assert intact(out) and intact(into)


def test_a_handle_reports_its_progress(sim, tag, make_paused):
    blocks = make_paused(name := tag(), [2 * MIB] * 4)
    told = Progress()
    with held(sim):
        start = time.monotonic()
        under_way = memsaver.resume(name, wait=False, progress=told)
        for _ in range(100):
            with pytest.raises(TimeoutError):
                under_way.wait(0.12)
            if len(told) >= 2:
                break
        assert 2 <= len(told) <= (time.monotonic() - start) / 0.05 + 2 and told[-1][0] == 0
        assert under_way.progress[0] == 0
    under_way.wait()
    assert told[-1] == under_way.progress == (8 * MIB, 8 * MIB)
    count = len(told)
    under_way.wait()
    assert len(told) == count, "the end is told once"
    assert set(told.threads) == {threading.current_thread()} and intact(blocks)


def test_progress_is_not_called_if_there_is_nothing_to_copy(sim, tag, make_blocks):
    make_blocks(name := tag(), [2 * MIB])
    told = Progress()
    for call in (memsaver.pause, memsaver.pause, memsaver.resume, memsaver.resume):
        call(name, progress=told)
        call(name, wait=False, progress=told).wait()
    assert told == []


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
            memsaver.resume(name)  # the same tag: waits for the pause, then resumes it
            assert memsaver.state(name) == "mapped"

    assert memsaver.pause(name, progress=callback).changed == (name,)
    assert started[0].wait().changed == (other,)
    assert memsaver.state(name) == "mapped" and intact(blocks)
