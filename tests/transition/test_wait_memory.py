"""Tests waits for a part of the memory that a background resume restores."""

import pytest
from looks import held, held_memory, intact, released_soon

import memsaver
from memsaver.errors import ConfigError, DriverError, OutOfDeviceMemoryError

MIB = 1 << 20
SIZES = [64 * MIB] * 3  # the bytes between two events of a resume
SHORT = [64 * MIB, 2 * MIB]


@pytest.fixture
def slow(sim):
    """Yield a function that slows copies, so that the copy of each block takes half a second."""
    yield lambda: sim.copy_rate(2 * SIZES[0])
    sim.copy_rate(0)


def has_arrived(block):
    """Return whether a block's last bytes have been copied."""
    end = block.address + block.nbytes
    return block.sim.read(end - 64, 64) != bytes(64)


def test_the_host_waits_for_the_copies_up_to_the_memory_and_not_for_later_ones(
    sim, tag, make_paused
):
    first, second, last = blocks = make_paused(name := tag(), SIZES)
    with held_memory(sim, last.address, last.nbytes):
        under_way = memsaver.resume(name, wait=False)
        under_way.wait_memory(first)
        assert has_arrived(first) and not has_arrived(last)
        under_way.wait_memory([(second.address, second.nbytes), (first.address + MIB, 7), first])
        assert has_arrived(second) and not under_way.done() and not has_arrived(last)
        with released_soon(sim):
            under_way.wait_memory((last.address, last.nbytes))
            assert intact(blocks)
    under_way.wait()
    under_way.wait_memory(first)  # over: nothing to wait for


def test_a_streams_work_waits_for_its_memory_alone(sim, tag, make_paused):
    blocks = make_paused(name := tag(), SIZES)
    with sim.stream() as stream, held_memory(sim, blocks[2].address, blocks[2].nbytes):
        with held(sim):
            under_way = memsaver.resume(name, wait=False)
            under_way.wait_stream(stream.value, memory=blocks[0])  # returns before any copy has run
            sim.memset(blocks[0].address, 7, MIB, stream)
        assert sim.opened.cuStreamSynchronize(stream) == 0
        assert sim.read(blocks[0].address, MIB) == bytes([7]) * MIB
        assert not under_way.done() and not has_arrived(blocks[2])
        with released_soon(sim):
            under_way.wait()
            assert intact(blocks[1:])


def test_memory_without_a_backup_waits_for_no_copy(sim, tag, make_paused):
    saved = make_paused(weights := tag("weights"), SHORT)
    (empty,) = make_paused(cache := tag("cache"), [2 * MIB], backup="none")
    last = saved[-1]
    with held_memory(sim, last.address, last.nbytes), sim.stream() as stream:
        under_way = memsaver.resume(weights, cache, wait=False)
        under_way.wait_stream(stream.value, memory=empty)
        sim.memset(empty.address, 7, empty.nbytes, stream)
        assert sim.opened.cuStreamSynchronize(stream) == 0
        assert not has_arrived(last)
        with released_soon(sim):
            under_way.wait_memory([empty, last])
            assert has_arrived(last)
    under_way.wait()
    assert intact(saved) and empty.bytes() == bytes([7]) * empty.nbytes


@pytest.mark.parametrize(
    ("backup", "restore"), [("none", True), ("pageable", True), ("disk", True), ("host", False)]
)
def test_a_resume_without_queued_copies_needs_no_events(sim, tag, make_paused, backup, restore):
    (block,) = make_paused(name := tag(), [70 * MIB], backup=backup)
    with sim.fault("cuEventCreate", times=0), sim.stream() as stream:
        under_way = memsaver.resume(name, wait=False, restore=restore)
        under_way.wait_stream(stream.value)
        under_way.wait_memory(block)
        under_way.wait()
    assert block.is_intact() if restore and backup != "none" else block.is_zero()


WHOLE = {
    "memory of no tag": lambda blocks: (0x1000, 512),
    "memory beyond the tag's": lambda blocks: (blocks[-1].address, blocks[-1].nbytes + (1 << 30)),
    "some of both": lambda blocks: [blocks[0], (0x1000, 1)],
}


@pytest.mark.parametrize("memory", WHOLE)
def test_unknown_memory_waits_for_all_copies(sim, tag, make_paused, slow, memory):
    blocks = make_paused(name := tag(), SHORT)
    slow()
    under_way = memsaver.resume(name, wait=False)
    under_way.wait_memory(WHOLE[memory](blocks))
    assert intact(blocks)
    under_way.wait()


@pytest.mark.parametrize("memory", [[], (0x1000, 0)], ids=["nothing", "no bytes"])
def test_a_wait_for_nothing_returns_when_the_copies_are_queued(sim, tag, make_paused, memory):
    blocks = make_paused(name := tag())
    with held(sim):
        under_way = memsaver.resume(name, wait=False)
        under_way.wait_memory(memory)
        assert not under_way.done() and sim.tag_bytes() == blocks[0].nbytes
    under_way.wait()


@pytest.mark.parametrize(
    ("backup", "restore"),
    [("none", True), ("host", True), ("pageable", True), ("disk", True), ("disk", False)],
)
def test_a_wait_sees_the_contents_with_every_backup(sim, tag, make_paused, backup, restore):
    blocks = make_paused(name := tag(), [2 * MIB, 512, 66 * MIB], backup=backup)
    under_way = memsaver.resume(name, wait=False, restore=restore)
    for block in blocks:
        under_way.wait_memory(block)
        assert block.is_intact() if restore and backup != "none" else block.is_zero()
    under_way.wait()


def test_poison_does_not_overwrite_work_that_waited_for_its_memory(sim, tag, make_paused, options):
    options(poison=True)
    (block,) = make_paused(name := tag(), [70 * MIB], backup="none")
    with sim.stream() as stream:
        with held(sim):
            under_way = memsaver.resume(name, wait=False)
            under_way.wait_stream(stream.value, memory=block)
            sim.memset(block.address, 7, block.nbytes, stream)
        under_way.wait()
        assert sim.opened.cuStreamSynchronize(stream) == 0
    assert block.bytes() == bytes([7]) * block.nbytes


def test_each_device_has_its_own_copies(run_python):
    run_python(
        """
        import memsaver
        from looks import intact
        from simulated_driver import Block, Simulator

        MIB = 1 << 20
        sim = Simulator()
        with memsaver.region("model", backup="host"):
            blocks = [Block(sim, 64 * MIB, 1 + at, device) for at, device in enumerate((0, 0, 1))]
        memsaver.pause("model")
        sim.copy_rate(128 * MIB)
        under_way = memsaver.resume("model", wait=False)
        under_way.wait_memory([blocks[2], blocks[0]])
        assert sim.read(blocks[1].address + 64 * MIB - 64, 64) == bytes(64)
        assert intact([blocks[2], blocks[0]])
        under_way.wait()
        assert intact(blocks)
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


FAULTS = {
    "no memory": ("cuMemCreate", 1, OutOfDeviceMemoryError),
    "a copy in the middle": ("cuMemcpyHtoDAsync", 2, memsaver.MemsaverError),
    "an event in the middle": ("cuEventRecord", 2, memsaver.MemsaverError),
    "no more events": ("cuEventCreate", 2, memsaver.MemsaverError),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_resume_is_the_error_of_every_wait(sim, tag, make_paused, fault):
    blocks = make_paused(name := tag(), SHORT)
    events = sim.counts().events
    call, nth, kind = FAULTS[fault]
    with sim.fault(call, sim.OUT_OF_MEMORY, nth):
        under_way = memsaver.resume(name, wait=False)
        for memory in (blocks[0], []):
            for wait in (under_way.wait_memory, lambda m: under_way.wait_stream(0, memory=m)):
                with pytest.raises(kind) as caught:
                    wait(memory)
                assert caught.value.tag == name
    assert memsaver.state(name) == "paused" and sim.tag_bytes() == 0
    assert sim.counts().events == events
    memsaver.resume(name)
    assert intact(blocks)


def test_a_swap_is_waited_for_as_a_whole(sim, tag, make_blocks, make_paused):
    coming = make_paused(into := tag("in"), SIZES[:1])
    going = make_blocks(out := tag("out"), SIZES[:1], backup="host")
    under_way = memsaver.swap(out=out, into=into, wait=False)
    under_way.wait_memory(coming[0])
    assert memsaver.state(out) == "paused" and intact(coming)
    under_way.wait()
    memsaver.swap(out=into, into=out)
    assert intact(going)


def test_a_stream_in_a_capture_cannot_wait(sim, tag, make_paused):
    import ctypes

    blocks = make_paused(name := tag())
    with sim.stream() as stream, held(sim):
        under_way = memsaver.resume(name, wait=False)
        under_way.wait_memory([])
        assert sim.opened.cuStreamBeginCapture_v2(stream, 0) == 0
        with pytest.raises(DriverError, match="cuStreamWaitEvent"):
            under_way.wait_stream(stream.value, memory=blocks[0])
        sim.opened.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))
    under_way.wait()
    assert intact(blocks)


@pytest.mark.parametrize("bad", [5, "weights", None, (1, 2, 3), (-1, 5), [object()], (True, 1)])
def test_other_objects_are_rejected(sim, tag, make_paused, bad):
    make_paused(name := tag())
    under_way = memsaver.resume(name, wait=False)
    with pytest.raises(ConfigError, match="has no address"):
        under_way.wait_memory(bad)
    under_way.wait()
