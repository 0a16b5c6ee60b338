"""Tests freeing memory in every tag state, during transitions, and while device work is pending."""

import random

import pytest
from looks import held, row_of

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError

MIB = 1 << 20
PAGE = 2 * MIB


def test_freeing_while_paused(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [MIB] * 6, backup="host")
    memsaver.pause(name)
    del blocks[1::2]
    assert len(memsaver.ranges(name)) == 3
    report = memsaver.resume(name)
    assert report.copied_bytes == 3 * MIB
    assert all(b.is_intact() for b in blocks)
    memsaver.pause(name)
    blocks.clear()
    assert memsaver.resume(name).bytes == 0
    assert sim.tag_bytes() == 0


@pytest.mark.parametrize("kind", ["pause", "resume", "failing pause"])
@pytest.mark.parametrize("left", [4, 0])
def test_freeing_during_another_threads_transition(
    sim, tag, make_blocks, in_thread, wait_until, kind, left
):
    name = tag()
    blocks = make_blocks(name, [MIB] * 7 + [8 * MIB], backup="host")
    if kind == "resume":
        memsaver.pause(name)
    if kind == "failing pause":
        sim.fail("cuMemUnmap", 1)
    with held(sim):  # a free that waited for the transition would wait forever
        task = in_thread(memsaver.resume if kind == "resume" else memsaver.pause, name)
        wait_until(lambda: memsaver.state(name) in ("saving", "restoring"))
        del blocks[: 8 - left]
        assert memsaver.state(name) == ("restoring" if kind == "resume" else "saving")
        assert len(memsaver.ranges(name)) == left
    if kind == "failing pause":
        with pytest.raises(memsaver.DriverError):
            task.result()
        sim.clear_faults()
    else:
        task.result()
    if kind == "pause":
        assert sim.tag_bytes() == 0 and (left or row_of(name).backup_bytes == 0)
        memsaver.resume(name)
    assert memsaver.state(name) == "mapped" and all(b.is_intact() for b in blocks)
    assert row_of(name).allocations == left
    blocks.clear()
    assert sim.tag_bytes() == 0


def test_freeing_from_other_threads(sim, tag, in_thread):
    name = tag()
    rng = random.Random(5)

    def take():
        with memsaver.region(name):
            return [_C.malloc(rng.choice([512, 5000, 3 * MIB])) for _ in range(100)]

    lists = [task.result() for task in [in_thread(take) for _ in range(4)]]
    mixed = [address for addresses in lists for address in addresses]
    assert len(set(mixed)) == 400
    rng.shuffle(mixed)
    for task in [in_thread(lambda part: [_C.free(a) for a in part], mixed[i::4]) for i in range(4)]:
        task.result()
    assert memsaver.ranges(name) == ()
    assert sim.tag_bytes() == 0


def test_invalid_frees_are_rejected(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [MIB])
    with pytest.raises(ConfigError, match="not allocated by memsaver") as caught:
        _C.free(0x1000)
    assert caught.value.status == "NOT_OURS"
    with pytest.raises(ConfigError, match="not the start of a live allocation") as caught:
        _C.free(block.address + 512)
    assert caught.value.tag == name
    with memsaver.region(name):
        address = _C.malloc(512)
    _C.free(address)
    with pytest.raises(ConfigError, match="freed twice"):
        _C.free(address)
    _C.free(0)
    assert block.is_intact()


def test_freed_memory_is_not_reused_under_work_in_flight(sim, tag):
    # A stream still writes to the freed memory; the next allocation must not receive these writes.
    name = tag()
    with memsaver.region(name):
        keep = simulator.buffer(512)
        for nbytes in (4096, PAGE, 16 * MIB):
            block = simulator.buffer(nbytes)
            with sim.stream() as stream:
                sim.stream_delay(0.05)
                sim.memset(block.address, 0xAA, nbytes, stream)
                del block
                again = simulator.buffer(nbytes)
                sim.write(again.address, bytes(nbytes))
                sim.stream_delay(0)
            assert not any(sim.read(again.address, nbytes)), "written by the freed block's work"
            del again
    assert keep.nbytes == 512
