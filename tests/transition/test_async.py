"""Tests background transitions: handles, errors, streams, `trim` and waits."""

import gc
import threading
import time
import warnings

import pytest
from looks import held, intact

import memsaver
from memsaver.errors import ConfigError, InvalidStateError, MemsaverWarning, UnknownTagError

pytestmark = pytest.mark.each_python

MIB = 1 << 20


# --- the handle -----------------------------------------------------------------------------------


def test_the_caller_continues_during_a_resume(sim, tag, make_blocks, make_paused):
    name, other = tag("name"), tag("other")
    blocks = make_paused(name)
    others = make_blocks(other, [MIB])
    memsaver.pause(other)
    with held(sim):
        under_way = memsaver.resume(name, wait=False)
        assert memsaver.state(name) == "restoring"
        assert not under_way.done() and "in progress" in repr(under_way)
        # Another tag can be resumed during the transition.
        assert memsaver.resume(other).bytes == 2 * MIB
        assert others[0].is_zero()
        assert memsaver.state(name) == "restoring" and not under_way.done()
    report = under_way.wait()
    assert under_way.done() and under_way.wait() is report
    assert report.changed == (name,) and report.copied_bytes == 2 * MIB
    assert memsaver.state(name) == "mapped" and intact(blocks)


def test_the_caller_continues_during_a_pause(sim, tag, make_blocks):
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
    # Even if the transition's thread starts late.
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


def test_a_region_and_paused_wait_for_it(sim, tag, make_blocks, make_paused):
    name = tag()
    blocks = make_paused(name)
    sim.stream_delay(0.05)
    resume = memsaver.resume(name, wait=False)
    blocks += make_blocks(name, [MIB])
    # The region waits until the memory is mapped, not until the resuming thread reports it.
    assert memsaver.state(name) == "mapped" and intact(blocks)
    assert resume.wait().changed == (name,)
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


def test_a_wait_ends_at_its_timeout_and_the_transition_continues(sim, tag, make_paused):
    blocks = make_paused(name := tag())
    with held(sim):
        under_way = memsaver.resume(name, wait=False)
        for timeout in (0, 0.02, -1):
            with pytest.raises(TimeoutError, match="and continues"):
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


def test_invalid_calls_are_rejected_at_once(sim, tag, make_blocks):
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
    for bad in (-1, 1 << 64):
        with pytest.raises(ConfigError, match="a stream's address"):
            under_way.wait_stream(bad)
    for job in (under_way, memsaver.trim()):
        for bad in ("5", float("nan"), True, [1]):
            with pytest.raises(ConfigError, match="timeout must be a number"):
                job.wait(bad)
        job.wait(float("inf"))
        job.wait(1e12)
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
            under_way.wait_stream(form(stream))  # returns before any copy has run
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


def test_waiting_on_a_stream_for_a_failing_transition(sim, tag, make_paused):
    (block,) = make_paused(name := tag())
    with sim.stream() as stream:
        with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
            under_way = memsaver.resume(name, wait=False)
            with pytest.raises(memsaver.OutOfDeviceMemoryError):
                under_way.wait_stream(stream.value)
    memsaver.resume(name)
    assert block.is_intact()


# --- trim -----------------------------------------------------------------------------------------


def test_trim_continues_in_the_background(sim, tag, make_paused):
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


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_background_transitions_on_a_gpu():
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


# --- calls that do not wait -----------------------------------------------------------------------


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
