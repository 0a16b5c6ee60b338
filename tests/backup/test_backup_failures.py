"""Tests failing driver calls during copies to and from backups in pageable memory or on disk."""

import contextlib

import pytest
from looks import intact

import memsaver
from memsaver.errors import DriverError, OutOfDeviceMemoryError, OutOfHostMemoryError

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20
STAGED = ["pageable", "disk"]
STAGING = 16 * MIB  # csrc/core/backup/staging.h: the size of one buffer
TYPED = (DriverError, OutOfDeviceMemoryError, OutOfHostMemoryError)


@pytest.fixture
def staged(sim, tag, make_blocks, options):
    """Return a function that creates two tags. The first tag's block needs two staging buffers."""

    def make(kind):
        options(fingerprints=False)  # test_fingerprint_failures.py tests their faults
        names = [tag("first"), tag("second")]
        blocks = make_blocks(names[0], [14 * MIB, 3 * MIB], backup=kind)
        del blocks[0]
        blocks += make_blocks(names[1], [1000], backup=kind)
        assert blocks[0].address // STAGING < (blocks[0].address + 3 * MIB) // STAGING
        return names, blocks

    return make


def clean(sim):
    """Return whether no host memory is retained or pinned after a trim()."""
    memsaver.trim(wait=True)
    return sim.counts().registered_bytes == memsaver.stats().host_bytes == 0


@pytest.mark.parametrize("kind", STAGED)
@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuStreamCreate"])
def test_buffers_that_could_not_be_unpinned(sim, staged, kind, call):
    # The buffers are counted while they are held, used again, and finally released.
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
    # Pages that are still pinned are counted, are used by nothing else, and are finally released.
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
