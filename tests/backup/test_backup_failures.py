"""Driver calls that fail while bytes go to pageable memory or a disk, and come back from there."""

import contextlib
import functools
import random
import re
from itertools import cycle

import pytest
from repository import ROOT

import memsaver
from memsaver.errors import DriverError, OutOfDeviceMemoryError, OutOfHostMemoryError

pytestmark = [
    pytest.mark.one_python,
    pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning"),
]

MIB = 1 << 20
STAGED = ["pageable", "disk"]
STAGING = 16 * MIB  # csrc/core/backup/staging.h: the most that one buffer carries
TYPED = (DriverError, OutOfDeviceMemoryError, OutOfHostMemoryError)
DRIVER_CALLS = re.findall(r"X\((cu\w+)\)", (ROOT / "csrc/core/driver/driver.h").read_text())


def intact(blocks):
    return all(block.bytes() == contents(block.seed, block.nbytes) for block in blocks)


@functools.cache
def contents(seed, nbytes):
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture
def faults(sim, in_thread):
    """Yields each way in which a driver call of an action fails: call, number, times, code.

    `before` puts everything into place, for the count and for each of them. The action has threads
    of its own, so that a context that could not be popped concerns nobody else.
    """

    def each(before, action):
        before()
        calls = {name: sim.calls(name) for name in DRIVER_CALLS}
        in_thread(action).result()
        made = {name: sim.calls(name) - calls[name] for name in DRIVER_CALLS}
        assert made["cuStreamSynchronize"] >= 3, "nothing was staged"
        codes = cycle([1, 2, 719])
        for name, count in made.items():
            step = 5 if name == "cuThreadExchangeStreamCaptureMode" else 1  # no error, and many
            for nth in range(1, count + 1, step):
                for times in (1, 0) if nth <= 3 else (nth % 2,):
                    before()
                    yield name, nth, times, next(codes)

    return each


@pytest.fixture
def attempt(sim, in_thread):
    """Does an action while a call fails: its error, or None."""

    def act(action, call, nth, times, code):
        with sim.fault(call, code, nth, times):
            try:
                in_thread(action).result()
            except TYPED as error:
                assert error.call == call and error.cuda_error == code, repr(error)
                return error
        return None

    return act


@pytest.fixture
def staged(sim, tag, make_blocks, options):
    """Two tags; the first one's block lies so that two buffers carry it."""

    def make(kind):
        options(fingerprints=False)  # test_fingerprint.py has the faults of finding them
        names = [tag("first"), tag("second")]
        blocks = make_blocks(names[0], [14 * MIB, 3 * MIB], backup=kind)
        del blocks[0]
        blocks += make_blocks(names[1], [1000], backup=kind)
        assert blocks[0].address // STAGING < (blocks[0].address + 3 * MIB) // STAGING
        return names, blocks

    return make


def clean(sim):
    """No host memory is held, nor pinned, once trim() could do its work."""
    memsaver.trim(wait=True)
    return sim.counts().registered_bytes == memsaver.stats().host_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", STAGED)
def test_a_pause_fails_at_every_call(sim, staged, faults, attempt, kind):
    names, blocks = staged(kind)

    def before():
        memsaver.resume(*names)
        assert clean(sim)

    def pause():
        memsaver.pause(*names)

    for fault in faults(before, pause):
        streams, device = max(sim.counts().streams, 2), sim.tag_bytes()  # one a direction
        if attempt(pause, *fault) is not None:
            assert {memsaver.state(n) for n in names} == {"mapped"}, fault
            assert intact(blocks) and sim.tag_bytes() == device, fault
            memsaver.pause(*names)
        assert {memsaver.state(n) for n in names} == {"paused"}, fault
        assert not any(sim.accessible(b.address) for b in blocks), fault
        memsaver.resume(*names)
        assert intact(blocks), fault
        assert sim.counts().streams <= streams + (fault[0] == "cuStreamDestroy") * 9, fault
    assert sim.violations() == [] and clean(sim)


@pytest.mark.long
@pytest.mark.parametrize("kind", STAGED)
def test_a_resume_fails_at_every_call(sim, staged, faults, attempt, kind):
    names, blocks = staged(kind)

    def before():
        memsaver.resume(*names)
        assert clean(sim)
        memsaver.pause(*names)

    def resume():
        memsaver.resume(*names)

    for fault in faults(before, resume):
        if attempt(resume, *fault) is not None:
            assert {memsaver.state(n) for n in names} == {"paused"}, fault
            assert not any(sim.accessible(b.address) for b in blocks), fault
            memsaver.pause(*names)
            memsaver.resume(*names)
        assert {memsaver.state(n) for n in names} == {"mapped"}, fault
        assert intact(blocks), fault
    assert sim.violations() == [] and clean(sim)


@pytest.mark.parametrize("kind", STAGED)
@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuStreamCreate"])
def test_buffers_that_could_not_be_unpinned(sim, staged, attempt, kind, call):
    # Counted as long as they are held, used again, and given back in the end.
    names, blocks = staged(kind)
    for _ in range(3):
        sim.fail("cuMemHostUnregister", 1, 1, 0)
        sim.fail(call, 1, 1, 1)
        with pytest.raises(TYPED):
            memsaver.pause(*names)
        memsaver.pause(*names)
        memsaver.resume(*names)
        assert intact(blocks)
        registered = sim.counts().registered_bytes
        assert 0 < registered <= 16 * MIB, "no more with every pause"
        assert memsaver.stats().host_bytes >= registered
    sim.clear_faults()
    assert clean(sim)
    with memsaver.paused(*names):
        pass
    assert intact(blocks) and sim.violations() == []


@pytest.mark.parametrize("kind", STAGED)
@pytest.mark.parametrize("call", ["cuMemHostUnregister", "cuCtxPushCurrent"])
def test_another_backup_while_pages_cannot_be_unpinned(
    sim, tag, make_blocks, options, in_thread, kind, call
):
    # Pages that are still pinned are counted and nobody else's, and go back in the end.
    options(fingerprints=False)
    blocks = make_blocks(name := tag(), [4 * MIB], backup="host")
    with memsaver.paused(name):
        pass
    count = sim.calls(call)
    for nth in range(1, 8):
        sim.fail(call, 1, nth, 0)
        with contextlib.suppress(*TYPED):
            in_thread(memsaver.pause, name, backup=kind).result()
        sim.clear_faults()
        registered = sim.counts().registered_bytes
        assert memsaver.stats().host_bytes >= registered, nth
        memsaver.resume(name)
        assert intact(blocks), nth
        memsaver.trim(wait=True)
        assert sim.counts().registered_bytes == memsaver.stats().host_bytes == 0, nth
        with memsaver.paused(name):
            pass
    assert intact(blocks) and sim.calls(call) > count
