"""Pause and resume: contents, addresses, states, reports, threads, callbacks, work in flight."""

import ctypes
import itertools
import random
import threading
import time
from typing import ClassVar

import pytest

import memsaver
from memsaver import simulator
from memsaver.errors import ConfigError, InvalidStateError, UnknownTagError
from memsaver.native import _C

MIB = 1 << 20
PAGE = 2 * MIB
SIZES = [1, 511, 512, 513, 4096, 100_000, MIB, PAGE - 512, PAGE, PAGE + 1, 5 * MIB + 77]


def row_of(name, device=0):
    return next(row for row in memsaver.stats()[name] if row.device == device)


def addresses(blocks):
    return [b.address for b in blocks]


@pytest.fixture
def slow(sim):
    """Makes every copy wait, so that a pause or a resume takes that long."""

    def set_delay(seconds=0.15):
        sim.stream_delay(seconds)

    yield set_delay
    sim.stream_delay(0)


# --- contents and addresses -----------------------------------------------------------------------


@pytest.mark.parametrize("cycles", [1, 4])
def test_backed_up_contents_come_back(sim, tag, make_blocks, cycles):
    name = tag()
    blocks = make_blocks(name, SIZES, backup="host")
    where = memsaver.ranges(name)
    for cycle in range(cycles):
        memsaver.pause(name)
        assert memsaver.state(name) == "paused"
        assert not any(sim.accessible(b.address) for b in blocks)
        assert sim.tag_bytes() == 0
        assert memsaver.ranges(name) == where
        memsaver.resume(name)
        assert memsaver.state(name) == "mapped"
        assert all(b.is_intact() for b in blocks)
        for b in blocks[cycle % 2 :: 2]:  # what changed between two cycles comes back changed
            b.fill(b.seed + 1000)
    assert memsaver.ranges(name) == where


@pytest.mark.parametrize("cycles", [1, 3])
def test_what_was_not_backed_up_reads_as_zero(sim, tag, make_blocks, cycles):
    name = tag()
    blocks = make_blocks(name, SIZES, backup="none")
    for _ in range(cycles):
        memsaver.pause(name)
        assert sim.tag_bytes() == 0
        memsaver.resume(name)
        assert all(b.is_zero() for b in blocks)
        for b in blocks:
            b.fill(b.seed + 1)


def test_a_resume_shows_nothing_of_other_memory(sim, tag, make_blocks):
    # Pages that another tag wrote to must come back cleared.
    name, other = tag("mine"), tag("other")
    blocks = make_blocks(name, [8 * MIB])
    memsaver.pause(name)
    secrets = make_blocks(other, [8 * MIB] * 4)
    del secrets
    memsaver.resume(name)
    assert blocks[0].is_zero()


@pytest.mark.parametrize("policy", ["none", "host"])
@pytest.mark.parametrize("override", ["none", "host"])
def test_a_pause_may_override_the_policy_once(sim, tag, make_blocks, policy, override):
    name = tag()
    blocks = make_blocks(name, [4096, 3 * MIB], backup=policy)
    for backup, kept in ((override, override), (None, policy)):
        memsaver.pause(name, backup=backup)
        assert row_of(name).backup == policy
        memsaver.resume(name)
        for b in blocks:
            assert b.is_intact() if kept == "host" else b.is_zero()
            b.fill(b.seed + 1)


def test_the_first_cycle_without_and_the_second_with_a_backup(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [4 * MIB], backup="host")
    memsaver.pause(name, backup="none")
    assert row_of(name).host_bytes == 0
    memsaver.resume(name)
    assert block.is_zero()
    block.fill(99)
    memsaver.pause(name)
    assert row_of(name).backup_bytes == 4 * MIB
    memsaver.resume(name)
    assert block.is_intact()


def test_an_interior_pointer_keeps_working(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [10 * MIB], backup="host")
    inside = block.address + 7 * MIB + 123
    expected = sim.read(inside, 1000)
    memsaver.pause(name)
    memsaver.resume(name)
    assert sim.read(inside, 1000) == expected
    sim.write(inside, b"written inside")
    assert block.bytes()[7 * MIB + 123 :][:14] == b"written inside"


def test_contents_that_span_pieces_and_cells(sim, tag, make_blocks, options):
    # Larger than a cell of the host backup (64 MiB), larger than a shared piece.
    options(share_bytes="2MiB", slab_bytes="2MiB")
    name = tag()
    blocks = make_blocks(name, [70 * MIB, 512, 65 * MIB + 512], backup="host")
    memsaver.pause(name)
    memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)
    options(share_bytes="1GiB", slab_bytes="1GiB")
    memsaver.pause(name)
    memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)


def test_new_and_deleted_blocks_between_cycles(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [100_000] * 30, backup="host")
    for cycle in range(4):
        memsaver.pause(name)
        del blocks[cycle::7]  # freed while paused
        memsaver.resume(name)
        assert all(b.is_intact() for b in blocks)
        del blocks[::5]  # freed while mapped
        blocks += make_blocks(name, [50_000, 200_000, 3 * MIB])
        assert all(b.is_intact() for b in blocks)
    spans = sorted((b.address, b.address + b.nbytes) for b in blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_tensor_survives(sim, tag):
    torch = pytest.importorskip("torch")
    name = tag()
    with memsaver.region(name, backup="host"):
        tensor = simulator.empty((300, 700), torch.float32)
        view = tensor[17, 5:50]
    tensor.copy_(torch.arange(300 * 700, dtype=torch.float32).reshape(300, 700))
    expected, pointer = tensor.clone(), tensor.data_ptr()
    with memsaver.paused(name):
        pass
    assert tensor.data_ptr() == pointer
    assert torch.equal(tensor, expected)
    assert torch.equal(view, expected[17, 5:50])


# --- which tags -----------------------------------------------------------------------------------


def test_tags_go_and_come_one_by_one(sim, tag, make_blocks):
    weights, kv = tag("weights"), tag("kv_cache")
    w = make_blocks(weights, [4 * MIB], backup="host")
    k = make_blocks(kv, [6 * MIB], backup="host")
    memsaver.pause(weights)
    assert k[0].is_intact() and sim.tag_bytes() == 6 * MIB
    memsaver.pause(kv)
    assert sim.tag_bytes() == 0
    memsaver.resume(weights)
    assert w[0].is_intact() and sim.tag_bytes() == 4 * MIB
    assert not sim.accessible(k[0].address)
    memsaver.resume(kv)
    assert k[0].is_intact() and sim.tag_bytes() == 10 * MIB


def test_no_names_mean_every_tag(sim, tag, make_blocks):
    names = [tag(), tag(), tag()]
    blocks = [make_blocks(name, [MIB], backup="host")[0] for name in names]
    memsaver.pause(names[1])
    report = memsaver.pause()
    changed = set(report.changed)
    assert {names[0], names[2]} <= changed and names[1] not in changed
    assert all(memsaver.state(name) == "paused" for name in names)
    assert sim.tag_bytes() == 0
    assert set(names) <= set(memsaver.resume().changed)
    assert all(b.is_intact() for b in blocks)


def test_pausing_what_is_paused_does_nothing_and_says_so(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB], backup="host") + make_blocks(second, [MIB], backup="host")
    report = memsaver.pause(first)
    assert report.changed == (first,)
    again = memsaver.pause(first)
    assert again.changed == () and again.bytes == 0 and again.copied_bytes == 0
    assert [(c.tag, c.device, c.changed) for c in again.changes] == [(first, 0, False)]
    both = memsaver.pause(first, second)
    assert both.changed == (second,)
    assert {c.tag: c.changed for c in both.changes} == {first: False, second: True}
    assert row_of(first).pauses == 1
    memsaver.pause(first, backup="none")  # does not touch the backup either
    memsaver.resume(first, second)
    assert all(b.is_intact() for b in blocks)


def test_resuming_what_is_mapped_does_nothing_and_says_so(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [MIB])
    report = memsaver.resume(name)
    assert report.changed == () and report.bytes == 0
    assert [(c.tag, c.device, c.changed) for c in report.changes] == [(name, 0, False)]
    assert block.is_intact()
    assert row_of(name).resumes == 0
    memsaver.pause(name)
    memsaver.resume(name)
    assert memsaver.resume(name).changed == ()


def test_a_tag_named_twice_counts_once(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    report = memsaver.pause(name, name)
    assert report.changed == (name,) and len(report.changes) == 1
    assert len(memsaver.resume(name, name).changes) == 1
    assert block.is_intact()


def test_an_unknown_tag_lists_the_known_ones(sim, tag, make_blocks):
    known, unknown = tag("known"), tag("unknown")
    (block,) = make_blocks(known, [MIB])
    for call in (memsaver.pause, memsaver.resume):
        with pytest.raises(UnknownTagError) as caught:
            call(known, unknown)
        assert caught.value.tag == unknown
        assert unknown in str(caught.value) and "known tags" in str(caught.value)
        assert memsaver.state(known) == "mapped"
    for call in (memsaver.state, memsaver.ranges):
        with pytest.raises(UnknownTagError):
            call(unknown)
    with pytest.raises(KeyError):
        memsaver.stats()[unknown]
    assert block.is_intact()


def test_the_message_for_an_unknown_tag(run_python):
    run_python(
        """
        import memsaver
        for name in ("weights", "kv_cache"):
            with memsaver.region(name):
                pass
        try:
            memsaver.resume("wieghts")
        except memsaver.UnknownTagError as error:
            assert "'wieghts'" in str(error)
            assert str(error).endswith("known tags: 'weights', 'kv_cache'"), str(error)
            assert isinstance(error, KeyError) and isinstance(error, memsaver.MemsaverError)
        else:
            raise AssertionError
        """
    )


# --- paused() -------------------------------------------------------------------------------------


def test_paused_is_a_pause_and_a_resume(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    with memsaver.paused(name) as report:
        assert report.changed == (name,)
        assert memsaver.state(name) == "paused"
    assert memsaver.state(name) == "mapped" and block.is_intact()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_paused_resumes_after_an_exception(sim, tag, make_blocks, error):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    with pytest.raises(error, match="mine"):
        with memsaver.paused(name):
            raise error("mine")
    assert memsaver.state(name) == "mapped" and block.is_intact()


def test_paused_leaves_alone_what_was_paused_already(sim, tag, make_blocks):
    before, now = tag("before"), tag("now")
    make = [make_blocks(before, [MIB], backup="host"), make_blocks(now, [MIB], backup="host")]
    memsaver.pause(before)
    with memsaver.paused(before, now) as report:
        assert report.changed == (now,)
    assert memsaver.state(before) == "paused"
    assert memsaver.state(now) == "mapped"
    with memsaver.paused(before):  # which pauses nothing, and must not resume everything then
        pass
    assert memsaver.state(before) == "paused"
    memsaver.resume(before)
    assert all(b.is_intact() for blocks in make for b in blocks)


def test_paused_with_a_backup_of_its_own(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="none")
    with memsaver.paused(name, backup="host"):
        pass
    assert block.is_intact()


def test_paused_that_fails_to_pause_runs_nothing(sim, tag):
    with pytest.raises(UnknownTagError):
        with memsaver.paused(tag()):
            pytest.fail("entered")


# --- reports and statistics -----------------------------------------------------------------------


def test_reports_say_what_the_driver_says(sim, tag, make_blocks):
    first, second, empty = tag("first"), tag("second"), tag("empty")
    blocks = make_blocks(first, [5 * MIB, 100], backup="host")
    blocks += make_blocks(second, [3 * MIB], backup="none")
    with memsaver.region(empty):
        pass
    held = sim.tag_bytes()
    report = memsaver.pause(first, second, empty)
    assert held - sim.tag_bytes() == report.bytes == sum(c.device_bytes for c in report.changes)
    assert report.copied_bytes == sum(r.bytes for r in memsaver.ranges(first))
    assert report.changed == (first, second, empty)
    assert {(c.tag, c.device) for c in report.changes} == {(first, 0), (second, 0), (empty, -1)}
    assert 0 < report.seconds < 10
    back = memsaver.resume(first, second, empty)
    assert back.bytes == sim.tag_bytes()
    assert back.copied_bytes == report.copied_bytes
    assert back.changed == (first, second, empty)


def test_statistics_equal_the_drivers(sim, tag, make_blocks):
    names = [tag(), tag(), tag()]
    alive = {name: make_blocks(name, [MIB, 3 * MIB, 70 * MIB], backup="host") for name in names}

    def check():
        assert memsaver.stats().resident_bytes == sim.tag_bytes()
        assert memsaver.device_memory(0)[0] == 80 * 1024 * MIB - sim.physical()
        assert memsaver.stats().host_bytes == sim.counts().registered_bytes

    check()
    memsaver.pause(names[0])
    check()
    del alive[names[0]][0], alive[names[1]][2]
    check()
    memsaver.pause(*names)
    check()
    memsaver.resume(*names[1:])
    check()
    alive.clear()
    check()
    memsaver.resume(*names)
    check()
    assert not any(row_of(name).resident_bytes for name in names)


def test_a_row_of_statistics(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [1000, 5000], backup="host")
    row = row_of(name)
    assert (row.tag, row.device, row.state, row.backup) == (name, 0, "mapped", "host")
    assert (row.allocations, row.allocated_bytes) == (2, 1024 + 5120)
    assert (row.resident_bytes, row.backup_bytes, row.host_bytes) == (PAGE, 0, 0)
    assert (row.pauses, row.resumes, row.last_pause_seconds, row.last_resume_seconds) == (0,) * 4
    memsaver.pause(name)
    row = row_of(name)
    assert (row.state, row.allocations, row.resident_bytes) == ("paused", 2, 0)
    assert row.backup_bytes == 1024 + 5120 and row.host_bytes >= row.backup_bytes
    assert row.pauses == 1 and row.last_pause_seconds > 0
    memsaver.resume(name)
    row = row_of(name)
    assert row.resumes == 1 and row.last_resume_seconds > 0 and row.backup_bytes == 0
    assert row.host_bytes > 0  # kept for the next pause
    assert len(blocks) == 2


def test_ranges_are_the_live_allocations_in_any_state(sim, tag, make_blocks):
    name = tag()
    assert_empty = tag("empty")
    with memsaver.region(assert_empty):
        pass
    assert memsaver.ranges(assert_empty) == ()
    blocks = make_blocks(name, [512, 1000, 3 * MIB])
    expected = sorted((b.address, -(-b.nbytes // 512) * 512) for b in blocks[:2])
    expected.append((blocks[2].address, 4 * MIB))
    assert sorted(memsaver.ranges(name)) == sorted(expected)
    assert list(memsaver.ranges(name)) == sorted(memsaver.ranges(name))
    memsaver.pause(name)
    assert sorted(memsaver.ranges(name)) == sorted(expected)
    assert memsaver.ranges(name, device=1) == ()
    del blocks[0]
    assert sorted(memsaver.ranges(name)) == sorted(expected[1:])


# --- freeing in every state -----------------------------------------------------------------------


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


def test_freeing_while_another_thread_pauses(sim, tag, make_blocks, in_thread, wait_until, slow):
    name = tag()
    blocks = make_blocks(name, [MIB] * 8, backup="host")
    slow()
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    start = time.perf_counter()
    del blocks[::2]
    assert time.perf_counter() - start < 0.1, "freeing waited for the pause"
    assert len(memsaver.ranges(name)) == 4
    assert memsaver.state(name) == "saving"
    task.result()
    assert sim.tag_bytes() == 0
    memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)
    assert row_of(name).allocations == 4


def test_freeing_while_another_thread_resumes(sim, tag, make_blocks, in_thread, wait_until, slow):
    name = tag()
    blocks = make_blocks(name, [MIB] * 8, backup="host")
    memsaver.pause(name)
    slow()
    task = in_thread(memsaver.resume, name)
    wait_until(lambda: memsaver.state(name) == "restoring")
    del blocks[::2]
    task.result()
    sim.stream_delay(0)
    assert all(b.is_intact() for b in blocks)
    assert row_of(name).allocations == 4
    blocks.clear()
    assert sim.tag_bytes() == 0


def test_freeing_everything_while_another_thread_pauses(
    sim, tag, make_blocks, in_thread, wait_until, slow
):
    name = tag()
    blocks = make_blocks(name, [MIB, 80 * MIB], backup="host")
    slow()
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    blocks.clear()
    task.result()
    assert row_of(name).allocations == 0 and row_of(name).backup_bytes == 0
    assert memsaver.resume(name).bytes == 0
    assert sim.tag_bytes() == 0


def test_freeing_while_a_pause_fails(sim, tag, make_blocks, in_thread, wait_until, slow):
    name = tag()
    blocks = make_blocks(name, [MIB] * 8, backup="host")
    slow()
    sim.fail("cuMemUnmap", 1)
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    del blocks[::2]
    with pytest.raises(memsaver.DriverError):
        task.result()
    sim.clear_faults()
    assert memsaver.state(name) == "mapped"
    assert all(b.is_intact() for b in blocks)
    assert row_of(name).allocations == 4


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


def test_what_cannot_be_freed(sim, tag, make_blocks):
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


def test_freed_memory_is_not_handed_out_under_work_in_flight(sim, tag):
    # A stream still writes to what was freed; the next allocation must not see that.
    name = tag()
    with memsaver.region(name):
        keep = simulator.buffer(512)
        for nbytes in (4096, PAGE, 64 * MIB):
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


# --- allocating while another thread changes the tag ----------------------------------------------


def test_a_region_waits_for_a_resume_and_is_entered(
    sim, tag, make_blocks, in_thread, wait_until, slow
):
    name = tag()
    blocks = make_blocks(name, [MIB] * 2, backup="host")
    memsaver.pause(name)
    slow()
    task = in_thread(memsaver.resume, name)
    wait_until(lambda: memsaver.state(name) == "restoring")
    blocks += make_blocks(name, [MIB])
    assert memsaver.state(name) == "mapped"
    task.result()
    assert all(b.is_intact() for b in blocks)


def test_a_region_waits_for_a_pause_and_is_refused(
    sim, tag, make_blocks, in_thread, wait_until, slow
):
    name = tag()
    blocks = make_blocks(name, [MIB] * 2, backup="host")
    slow()
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    with pytest.raises(InvalidStateError, match="paused"):
        with memsaver.region(name):
            pytest.fail("entered")
    task.result()
    sim.stream_delay(0)
    memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)


def test_a_region_waits_for_a_pause_that_fails_and_is_entered(
    sim, tag, make_blocks, in_thread, wait_until, slow
):
    name = tag()
    blocks = make_blocks(name, [MIB] * 2, backup="host")
    slow()
    sim.fail("cuMemUnmap", 1)
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    blocks += make_blocks(name, [MIB])
    with pytest.raises(memsaver.DriverError):
        task.result()
    assert all(b.is_intact() for b in blocks)


def test_memory_in_another_tag_while_one_is_paused_by_another_thread(
    sim, tag, make_blocks, in_thread, wait_until, slow
):
    name, other = tag("slow"), tag("other")
    blocks = make_blocks(name, [MIB], backup="host")
    slow(0.3)
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    with memsaver.region(other):
        mine = simulator.buffer(MIB)
    assert memsaver.state(name) == "saving", "an unrelated allocation waited for the pause"
    memsaver.stats(), memsaver.ranges(name), memsaver.device_memory()
    assert memsaver.state(name) == "saving", "a question waited for the pause"
    task.result()
    sim.stream_delay(0)
    memsaver.resume(name)
    assert blocks[0].is_intact() and mine.nbytes == MIB


def test_the_processes_own_tag_while_another_thread_pauses_it(run_python):
    # Without a region: memory is made in MEMSAVER_TAG, wherever a thread is in its work.
    run_python(
        """
        import threading, time
        import memsaver
        from simulated_driver import Simulator
        from tasks import Task
        from memsaver import simulator
        from memsaver._C import malloc

        sim = Simulator()
        first = simulator.buffer(1 << 20)
        sim.write(first.address, b"kept")
        assert memsaver.state("all") == "mapped"
        sim.stream_delay(0.2)
        task = Task(memsaver.pause, "all")
        while memsaver.state("all") != "saving":
            pass
        try:
            malloc(4096)
        except memsaver.InvalidStateError:
            pass
        else:
            raise AssertionError("memory in a tag that is being paused")
        task.result()
        sim.stream_delay(0)
        memsaver.resume("all")
        assert sim.read(first.address, 4) == b"kept"
        second = simulator.buffer(1 << 20)
        sim.write(second.address, b"new")
        assert not sim.violations()
        """,
        MEMSAVER_TAG="all",
        MEMSAVER_BACKUP="host",
    )


def test_a_pause_waits_for_another_threads_pause(
    sim, tag, make_blocks, in_thread, wait_until, slow
):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    slow()
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    assert memsaver.pause(name).changed == ()
    assert memsaver.state(name) == "paused"
    assert task.result().changed == (name,)
    task = in_thread(memsaver.resume, name)
    wait_until(lambda: memsaver.state(name) == "restoring")
    assert memsaver.resume(name).changed == ()
    assert task.result().changed == (name,)
    assert blocks[0].is_intact()


@pytest.mark.long
def test_eight_threads_and_overlapping_tags(sim, tag, make_blocks, in_thread):
    names = [tag() for _ in range(5)]
    kept = {name: make_blocks(name, [MIB, 3 * MIB + 5, 512], backup="host") for name in names}
    stop = time.monotonic() + 4

    def work(seed):
        rng = random.Random(seed)
        done = 0
        while time.monotonic() < stop:
            some = rng.sample(names, rng.randint(1, 5))
            action = rng.randrange(6)
            if action < 2:
                memsaver.pause(*some)
            elif action < 4:
                memsaver.resume(*some)
            elif action == 4:
                with memsaver.paused(*some):
                    pass
            else:
                try:
                    make = [simulator.buffer(rng.choice([512, 70_000, 3 * MIB]))]
                except InvalidStateError:
                    make = []  # no region here
                try:
                    with memsaver.region(some[0]):
                        make.append(simulator.buffer(rng.choice([512, 70_000, 3 * MIB])))
                except InvalidStateError:
                    pass  # paused
                del make
            done += 1
        return done

    def tolerant(seed):
        rng, done = seed * 1000, 0
        while time.monotonic() < stop:
            try:
                done += work(rng)
            except InvalidStateError as error:  # a pause met another thread's open region
                assert "while a region of it is open" in str(error)
            rng += 1
        return done

    done = [task.result() for task in [in_thread(tolerant, seed) for seed in range(8)]]
    assert sum(done) > 100
    memsaver.resume(*names)
    for name in names:
        assert all(b.is_intact() for b in kept[name])
        assert row_of(name).allocations == 3
    memsaver.pause(*names)
    assert sim.tag_bytes() == 0


def test_other_threads_run_while_one_pauses(sim, tag, make_blocks, in_thread, wait_until, slow):
    # The GIL is not held while a pause or a resume waits.
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    slow(0.3)
    for call, during in ((memsaver.pause, "saving"), (memsaver.resume, "restoring")):
        task = in_thread(call, name)
        wait_until(lambda during=during: memsaver.state(name) == during)
        counted = 0
        while memsaver.state(name) == during:
            counted += 1
        task.result()
        assert counted > 100
    assert blocks[0].is_intact()


# --- work in flight -------------------------------------------------------------------------------


@pytest.mark.parametrize("backup", ["host", "none"])
def test_a_pause_waits_for_work_in_flight(sim, tag, make_blocks, backup):
    name = tag()
    (block,) = make_blocks(name, [4 * MIB], backup=backup)
    with sim.stream() as first, sim.stream() as second:
        sim.stream_delay(0.05)
        for value in (1, 2, 3):
            sim.memset(block.address, value, 2 * MIB, first)
            sim.memset(block.address + 2 * MIB, value + 10, 2 * MIB, second)
        sim.stream_delay(0)
        memsaver.pause(name)
        assert sim.counts().queued_operations == 0
        assert sim.violations() == []
    memsaver.resume(name)
    expected = bytes([3]) * (2 * MIB) + bytes([13]) * (2 * MIB)
    assert block.bytes() == (expected if backup == "host" else bytes(4 * MIB))


@pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")
def test_work_in_flight_is_waited_for_though_no_device_can_be_asked_about(sim, tag, make_blocks):
    """What cannot be asked about is not taken for idle: nothing is taken away from it."""
    name = tag()
    block, other = make_blocks(name, [2 * MIB, 2 * MIB], backup="host")
    with sim.stream() as stream:
        sim.stream_delay(0.05)
        for each in (block, other):
            sim.memset(each.address, 5, 2 * MIB, stream)
        with sim.fault("cuDevicePrimaryCtxGetState", times=0):
            with pytest.raises(memsaver.DriverError):
                memsaver.pause(name)
            del each, other  # which frees it
        assert sim.counts().queued_operations > 0
        assert memsaver.state(name) == "mapped"
        sim.stream_delay(0)
    assert sim.violations() == []
    assert block.bytes() == bytes([5]) * (2 * MIB)
    memsaver.pause(name)
    assert sim.tag_bytes() == 0


def test_a_resume_that_cannot_find_out_who_may_reach_its_memory_fails(run_python):
    """Else another device would meet an illegal access, much later."""
    run_python(
        """
        import memsaver
        from memsaver import simulator
        from simulated_driver import Simulator

        sim = Simulator()
        for device in range(2):
            sim.start(device)
        with memsaver.region("a", backup="host"):
            block = simulator.buffer(4096)
        sim.write(block.address, b"x" * 4096)
        memsaver.pause("a")
        with sim.fault("cuDeviceCanAccessPeer"):
            try:
                memsaver.resume("a")
            except memsaver.DriverError as error:
                assert error.call == "cuDeviceCanAccessPeer", error
            else:
                raise AssertionError("it was resumed")
        assert memsaver.state("a") == "paused"
        memsaver.resume("a")
        assert sim.read(block.address, 4096) == b"x" * 4096
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


def test_a_pause_that_fails_has_not_disturbed_work_in_flight(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [4 * MIB], backup="host")
    with sim.stream() as stream:
        sim.stream_delay(0.05)
        sim.memset(block.address, 7, 4 * MIB, stream)
        with sim.fault("cuMemHostRegister", sim.OUT_OF_MEMORY, times=0):
            with pytest.raises(memsaver.OutOfHostMemoryError):
                memsaver.pause(name)
    assert block.bytes() == bytes([7]) * (4 * MIB)


def test_freeing_waits_for_work_in_flight(sim, tag):
    name = tag()
    with memsaver.region(name):
        block = simulator.buffer(64 * MIB)
    with sim.stream() as stream:
        sim.stream_delay(0.05)
        sim.memset(block.address, 7, 64 * MIB, stream)
        del block
        assert sim.violations() == []
    assert sim.tag_bytes() == 0


def test_copies_of_a_resume_are_done_when_it_returns(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [3 * MIB] * 3, backup="host")
    memsaver.pause(name)
    sim.stream_delay(0.05)
    memsaver.resume(name)
    assert sim.counts().queued_operations == 0
    sim.stream_delay(0)
    assert all(b.is_intact() for b in blocks)


def test_work_on_memory_of_no_tag_is_not_disturbed(sim, tag, make_blocks):
    name, other = tag("paused"), tag("used")
    make_blocks(name, [MIB])
    (block,) = make_blocks(other, [MIB])
    with sim.stream() as stream:
        sim.stream_delay(0.02)
        sim.memset(block.address, 9, MIB, stream)
        memsaver.pause(name)
    assert block.bytes() == bytes([9]) * MIB


# --- captures -------------------------------------------------------------------------------------


def test_allocating_and_freeing_keep_a_capture_valid(sim, tag, make_blocks):
    name = tag()
    first = make_blocks(name, [MIB, 64 * MIB])
    graph = ctypes.c_void_p()
    with sim.stream() as stream:
        for mode in (0, 1, 2):
            assert sim.opened.cuStreamBeginCapture_v2(stream, mode) == 0
            with memsaver.region(name):
                made = [simulator.buffer(n) for n in (4096, 3 * MIB, 64 * MIB)]
            sim.memset(made[1].address, 5, MIB, stream)
            del made, first[:]
            assert sim.opened.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0, "invalidated"
            sim.opened.cuGraphDestroy(graph)
            first += make_blocks(name, [MIB, 64 * MIB])
    first.clear()
    memsaver.pause(name)
    memsaver.resume(name)
    assert sim.tag_bytes() == 0


# --- dead blocks ----------------------------------------------------------------------------------


def test_dead_ranges_are_neither_saved_nor_restored(sim, tag, make_blocks):
    name = tag()
    live, dead, part = make_blocks(name, [MIB, 2 * MIB, 4 * MIB], backup="host")
    contents = part.bytes()
    holes = [(dead.address, dead.nbytes), (part.address + MIB, MIB), (part.address + 3 * MIB, 512)]
    rows = _C.pause([name], -1, holes)
    saved = MIB + 4 * MIB - MIB - 512
    assert rows == [(name, 0, True, rows[0][3], saved)]
    assert row_of(name).backup_bytes == saved
    assert bytes(_C.backup_view(live.address, MIB)) == live.expected()
    for address, nbytes in [(dead.address, 1), (part.address, 4 * MIB), (part.address + MIB, 512)]:
        with pytest.raises(InvalidStateError, match="not all of the range was saved"):
            _C.backup_view(address, nbytes)
    assert memsaver.resume(name).copied_bytes == saved
    assert live.is_intact() and dead.is_zero()
    expected = bytearray(contents)
    expected[MIB : 2 * MIB] = bytes(MIB)
    expected[3 * MIB : 3 * MIB + 512] = bytes(512)
    assert part.bytes() == bytes(expected)


def test_dead_ranges_of_other_tags_and_other_memory_do_no_harm(sim, tag, make_blocks):
    name, other = tag("paused"), tag("other")
    (block,) = make_blocks(name, [MIB], backup="host")
    (foreign,) = make_blocks(other, [MIB])
    holes = [
        (foreign.address, MIB),
        (0, 4096),
        (0xDEAD000, 1 << 20),
        (block.address - 4096, 4096),
        (block.address + MIB, 4096),
        (block.address, 0),
    ]
    _C.pause([name], -1, holes)
    assert foreign.is_intact()
    memsaver.resume(name)
    assert block.is_intact()


def test_overlapping_and_unsorted_dead_ranges(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    contents = bytearray(block.bytes())
    holes = [(700_000, 100_000), (100, 50), (100, 10), (120, 1000), (699_000, 2000)]
    _C.pause([name], -1, [(block.address + at, n) for at, n in holes])
    memsaver.resume(name)
    for at, n in holes:
        contents[at : at + n] = bytes(n)
    assert block.bytes() == bytes(contents)


def test_dead_ranges_of_one_pause_live_in_the_next(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    _C.pause([name], -1, [(block.address, MIB)])
    memsaver.resume(name)
    assert block.is_zero()
    block.fill(5)
    memsaver.pause(name)
    memsaver.resume(name)
    assert block.is_intact()


# --- the backup itself ----------------------------------------------------------------------------


def test_a_backup_view_is_the_contents(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [100, MIB, 70 * MIB], backup="host")
    memsaver.pause(name)
    for b in blocks:
        assert bytes(_C.backup_view(b.address, b.nbytes)) == b.expected()
        assert bytes(_C.backup_view(b.address + 7, b.nbytes - 7)) == b.expected()[7:]


def test_a_backup_view_of_a_tensor(sim, tag):
    torch = pytest.importorskip("torch")
    name = tag()
    with memsaver.region(name, backup="host"):
        tensor = simulator.empty((64, 100), torch.int32)
        wide = simulator.empty((10, 10), torch.bfloat16)
        nothing = simulator.empty((0, 3), torch.float32)
    tensor.copy_(torch.randint(-(2**31), 2**31 - 1, (64, 100), dtype=torch.int32))
    wide.copy_(torch.randn(10, 10))
    expected, slice_, column = tensor.clone(), tensor[3:60:2, ::7], tensor[:, 5]
    expected_wide = wide.clone()
    memsaver.pause(name)
    view = memsaver.backup_view(tensor)
    assert view.shape == tensor.shape and view.dtype == tensor.dtype
    assert view.stride() == tensor.stride()
    assert torch.equal(view, expected)
    assert torch.equal(memsaver.backup_view(wide), expected_wide)
    assert torch.equal(memsaver.backup_view(slice_), expected[3:60:2, ::7])
    assert torch.equal(memsaver.backup_view(column), expected[:, 5])
    assert torch.equal(memsaver.backup_view(tensor.t()), expected.t())
    assert memsaver.backup_view(nothing).shape == (0, 3)
    with pytest.raises(InvalidStateError, match="writable=True"):
        view[7, 7] = 12345
    # What is written to a writable one comes back with the resume.
    memsaver.backup_view(tensor, writable=True)[7, 7] = 12345
    del view
    memsaver.resume(name)
    expected[7, 7] = 12345
    assert torch.equal(tensor, expected)
    for bad in (tensor, slice_):
        with pytest.raises(InvalidStateError, match="mapped"):
            memsaver.backup_view(bad)


def test_what_has_no_backup_view(sim, tag, make_blocks):
    torch = pytest.importorskip("torch")
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="none")
    with pytest.raises(InvalidStateError, match="only while it is paused"):
        _C.backup_view(block.address, 1)
    memsaver.pause(name)
    with pytest.raises(InvalidStateError, match="had no backup"):
        _C.backup_view(block.address, 1)
    memsaver.resume(name)
    memsaver.pause(name, backup="host")
    with pytest.raises(InvalidStateError):
        _C.backup_view(block.address, MIB + 1)  # reaches behind the block
    with pytest.raises(ConfigError, match="no region") as caught:
        memsaver.backup_view(torch.zeros(3))
    assert caught.value.status == "NOT_OURS"
    for bad in (None, block, [1, 2], "x"):
        with pytest.raises(ConfigError, match="takes a torch tensor"):
            memsaver.backup_view(bad)


def test_trim_returns_what_backs_no_paused_tag(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [3 * MIB], backup="host")
    blocks += make_blocks(second, [5 * MIB], backup="host")
    memsaver.trim(wait=True)
    assert memsaver.trim(wait=True) == 0
    memsaver.pause(first, second)
    assert memsaver.trim(wait=True) < MIB  # where fingerprints came back
    assert memsaver.trim(wait=True) == 0
    memsaver.resume(first)
    kept = row_of(first).host_bytes
    assert kept >= 3 * MIB
    assert memsaver.trim(wait=True) == kept
    assert row_of(first).host_bytes == 0
    assert sim.counts().registered_bytes == row_of(second).host_bytes > 0
    memsaver.resume(second)
    assert all(b.is_intact() for b in blocks)
    with memsaver.paused(first, second):
        pass
    assert all(b.is_intact() for b in blocks)
    memsaver.trim(wait=True)
    assert sim.counts().registered_bytes == 0


def test_trim_does_not_wait_for_a_pause(sim, tag, make_blocks, in_thread, wait_until, slow):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    slow(0.3)
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    memsaver.trim(wait=True)
    assert memsaver.state(name) == "saving"
    task.result()
    sim.stream_delay(0)
    memsaver.resume(name)
    assert blocks[0].is_intact()


def test_host_memory_is_kept_across_cycles(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [3 * MIB, 70 * MIB], backup="host")
    memsaver.pause(name)
    held = row_of(name).host_bytes
    assert 73 * MIB <= held <= 77 * MIB
    memsaver.resume(name)
    # No host memory more is to be had, and none is needed.
    sim.host_limit(held)
    for _ in range(3):
        memsaver.pause(name)
        memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)


# --- callbacks ------------------------------------------------------------------------------------


@pytest.fixture
def events():
    """What callbacks saw, and a way to register them that is undone."""

    class Events(list):
        registered: ClassVar[list] = []

        def on(self, function, *arguments):
            self.registered.append(function(*arguments))
            return self.registered[-1]

        def note(self, what):
            return lambda tag: self.append((what, tag, str(memsaver.state(tag))))

    events = Events()
    yield events
    for registration in events.registered:
        registration.remove()
    events.registered.clear()


def test_callbacks_see_the_tag_while_it_is_mapped(sim, tag, make_blocks, events):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB]) + make_blocks(second, [MIB])
    events.on(memsaver.on_pause, events.note("pause 1"))
    events.on(memsaver.on_pause, events.note("pause 2"))
    events.on(memsaver.on_resume, events.note("resume 1"))
    events.on(memsaver.on_resume, events.note("resume 2"))
    memsaver.pause(first, second)
    assert events == [
        ("pause 1", first, "mapped"),
        ("pause 2", first, "mapped"),
        ("pause 1", second, "mapped"),
        ("pause 2", second, "mapped"),
    ]
    events.clear()
    memsaver.resume(second, first)
    assert events == [
        ("resume 1", second, "mapped"),
        ("resume 2", second, "mapped"),
        ("resume 1", first, "mapped"),
        ("resume 2", first, "mapped"),
    ]
    assert len(blocks) == 2


def test_callbacks_are_for_what_changes(sim, tag, make_blocks, events):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB]) + make_blocks(second, [MIB])
    memsaver.pause(first)
    events.on(memsaver.on_pause, events.note("pause"))
    events.on(memsaver.on_resume, events.note("resume"))
    memsaver.pause(first, second)
    assert [(what, name) for what, name, _ in events] == [("pause", second)]
    memsaver.pause(first, second)
    assert len(events) == 1
    memsaver.resume(first)
    memsaver.resume(first)
    assert [(what, name) for what, name, _ in events[1:]] == [("resume", first)]
    assert len(blocks) == 2


def test_a_callback_for_one_tag_and_its_removal(sim, tag, make_blocks, events):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB]) + make_blocks(second, [MIB])
    one = events.on(memsaver.on_pause, events.note("one"), second)
    events.on(memsaver.on_pause, events.note("all"))
    memsaver.pause(first, second)
    assert [(what, name) for what, name, _ in events] == [
        ("all", first),
        ("one", second),
        ("all", second),
    ]
    memsaver.resume(first, second)
    one.remove()
    one.remove()
    events.clear()
    memsaver.pause(first, second)
    assert [what for what, _, _ in events] == ["all", "all"]
    assert len(blocks) == 2


def test_callbacks_as_decorators(sim, tag, make_blocks, events):
    name = tag()
    blocks = make_blocks(name, [MIB])
    seen = []

    @memsaver.on_pause
    def before(tag):
        seen.append(("before", tag))
        return 42

    @memsaver.on_resume
    def after(tag):
        seen.append(("after", tag))

    events.registered += [before, after]
    with memsaver.paused(name):
        pass
    assert seen == [("before", name), ("after", name)]
    assert before("by hand") == 42
    assert len(blocks) == 1


def test_a_callback_may_call_memsaver(sim, tag, make_blocks, events):
    name, other = tag("name"), tag("other")
    blocks = make_blocks(name, [MIB], backup="host") + make_blocks(other, [MIB], backup="host")
    seen = []
    events.on(memsaver.on_pause, lambda t: seen.append(memsaver.ranges(t)), name)
    events.on(memsaver.on_pause, lambda t: memsaver.pause(other), name)
    events.on(memsaver.on_resume, lambda t: memsaver.resume(other), name)
    memsaver.pause(name)
    assert memsaver.state(other) == "paused"
    memsaver.resume(name)
    assert memsaver.state(other) == "mapped"
    assert seen == [memsaver.ranges(name)]
    assert all(b.is_intact() for b in blocks)


def test_a_callback_that_raises_prevents_the_pause(sim, tag, make_blocks, events):
    names = [tag("first"), tag("second"), tag("third")]
    blocks = [make_blocks(name, [MIB], backup="host")[0] for name in names]

    def refuse(tag):
        raise LookupError("not now")

    events.on(memsaver.on_pause, events.note("pause"))
    events.on(memsaver.on_pause, refuse, names[1])
    events.on(memsaver.on_resume, events.note("resume"))
    with pytest.raises(LookupError, match="not now"):
        memsaver.pause(*names)
    assert all(memsaver.state(name) == "mapped" for name in names)
    assert all(b.is_intact() for b in blocks)
    told = [(what, name) for what, name, _ in events]
    assert ("pause", names[2]) not in told and ("resume", names[2]) not in told
    for name in names[:2]:
        assert told.count(("pause", name)) == told.count(("resume", name)) == 1


def test_a_callback_that_raises_after_a_resume(sim, tag, make_blocks, events):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB], backup="host") + make_blocks(second, [MIB], backup="host")
    memsaver.pause(first, second)

    def fail(tag):
        raise LookupError(tag)

    events.on(memsaver.on_resume, fail)
    events.on(memsaver.on_resume, events.note("resume"))
    with pytest.raises(LookupError, match=first):
        memsaver.resume(first, second)
    assert [(what, name) for what, name, _ in events] == [("resume", first), ("resume", second)]
    assert memsaver.state(first) == memsaver.state(second) == "mapped"
    assert all(b.is_intact() for b in blocks)


def test_a_failed_pause_announces_the_resume(sim, tag, make_blocks, events):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB], backup="host") + make_blocks(second, [MIB], backup="host")
    events.on(memsaver.on_pause, events.note("pause"))
    events.on(memsaver.on_resume, events.note("resume"))
    with sim.fault("cuMemUnmap"):
        with pytest.raises(memsaver.DriverError):
            memsaver.pause(first, second)
    assert [(what, name) for what, name, _ in events] == [
        ("pause", first),
        ("pause", second),
        ("resume", first),
        ("resume", second),
    ]
    assert {state for _, _, state in events} == {"mapped"}
    assert all(b.is_intact() for b in blocks)


def test_a_failed_pause_tells_everybody_and_raises_its_own_error(sim, tag, make_blocks, events):
    # Also when a callback fails, on top of the pause.
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB]) + make_blocks(second, [MIB])

    def fail(tag):
        raise LookupError(tag)

    events.on(memsaver.on_resume, fail)
    events.on(memsaver.on_resume, events.note("resume"))
    with sim.fault("cuMemUnmap"):
        with pytest.raises(memsaver.DriverError):
            memsaver.pause(first, second)
    assert [(what, name) for what, name, _ in events] == [("resume", first), ("resume", second)]
    assert len(blocks) == 2


def test_a_failed_resume_announces_nothing(sim, tag, make_blocks, events):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    memsaver.pause(name)
    events.on(memsaver.on_resume, events.note("resume"))
    with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
        with pytest.raises(memsaver.OutOfDeviceMemoryError):
            memsaver.resume(name)
    assert events == []
    memsaver.resume(name)
    assert [what for what, _, _ in events] == ["resume"]
    assert blocks[0].is_intact()


def test_an_unknown_tag_is_told_before_any_callback(sim, tag, make_blocks, events):
    name, unknown = tag("known"), tag("unknown")
    blocks = make_blocks(name, [MIB])
    events.on(memsaver.on_pause, events.note("pause"))
    with pytest.raises(UnknownTagError):
        memsaver.pause(name, unknown)
    assert events == []
    assert blocks[0].is_intact()


def test_a_pause_of_a_tag_that_is_being_resumed_is_announced(
    sim, tag, make_blocks, events, in_thread, wait_until, slow
):
    # Whoever registered pages must hear of every pause that happens.
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    memsaver.pause(name)
    events.on(memsaver.on_pause, lambda t: events.append("pause"), name)
    events.on(memsaver.on_resume, lambda t: events.append("resume"), name)
    slow()
    task = in_thread(memsaver.resume, name)
    wait_until(lambda: memsaver.state(name) == "restoring")
    report = memsaver.pause(name)
    task.result()
    assert report.changed == (name,)
    assert sorted(events) == ["pause", "resume"]
    sim.stream_delay(0)
    memsaver.resume(name)
    assert blocks[0].is_intact()


def test_callbacks_run_on_the_calling_thread_without_a_lock(
    sim, tag, make_blocks, events, in_thread
):
    # A callback that waits for another thread, which uses the same tag, must not deadlock.
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    threads = []

    def callback(tag):
        threads.append(threading.current_thread())
        more = in_thread(make_blocks, tag, [MIB]).result(timeout=10)
        assert memsaver.state(tag) == "mapped"
        more.clear()

    events.on(memsaver.on_pause, callback)
    events.on(memsaver.on_resume, callback)
    memsaver.pause(name)
    memsaver.resume(name)
    assert threads == [threading.current_thread()] * 2
    assert blocks[0].is_intact()


# --- two devices ----------------------------------------------------------------------------------


def test_two_devices(run_python):
    run_python(
        """
        import memsaver
        from simulated_driver import Block, Simulator
        from memsaver import simulator

        MIB = 1 << 20
        sim = Simulator()
        sim.start(0), sim.start(1)
        with memsaver.region("both", backup="host"):
            blocks = [Block(sim, 3 * MIB, 1, 0), Block(sim, 5 * MIB, 2, 1)]
        with memsaver.region("second", backup="host"):
            blocks += [Block(sim, 7 * MIB, 3, 1)]

        def resident():
            rows = memsaver.stats().tags
            for device in (0, 1):
                mine = sum(row.resident_bytes for row in rows if row.device == device)
                assert mine == sim.tag_bytes(device)
            return sim.tag_bytes(0), sim.tag_bytes(1)

        full = resident()
        assert min(full) > 0
        report = memsaver.pause("both")
        assert {(c.tag, c.device, c.changed) for c in report.changes} == {
            ("both", 0, True), ("both", 1, True)}
        assert report.bytes == sum(full) - sum(resident())
        assert report.copied_bytes == 4 * MIB + 6 * MIB
        assert sim.tag_bytes(0) == 0
        memsaver.pause()
        assert resident() == (0, 0)
        memsaver.resume("second")
        assert sim.tag_bytes(0) == 0 and blocks[2].is_intact()
        memsaver.resume()
        assert all(b.is_intact() for b in blocks)

        # All or nothing across devices: the second one has no memory.
        memsaver.pause()
        sim.occupy((80 << 30) - sim.physical(1) - 8 * MIB, 1)
        try:
            memsaver.resume()
        except memsaver.OutOfDeviceMemoryError as error:
            assert "device 1" in str(error), error
            assert error.needed == 14 * MIB and error.free == 8 * MIB, (error.needed, error.free)
        else:
            raise AssertionError
        assert resident() == (0, 0)
        assert memsaver.state("both") == memsaver.state("second") == "paused"
        sim.occupy(0, 1)
        memsaver.resume()
        assert all(b.is_intact() for b in blocks)

        # A pause that fails on the second device has changed nothing on the first.
        sim.fail("cuMemUnmap", 1, nth=3)
        try:
            memsaver.pause()
        except memsaver.DriverError:
            pass
        else:
            raise AssertionError
        sim.clear_faults()
        assert all(b.is_intact() for b in blocks)

        # Work on either device is waited for.
        with sim.stream(0) as a, sim.stream(1) as b:
            sim.stream_delay(0.05)
            sim.memset(blocks[0].address, 1, 3 * MIB, a)
            memsaver.device_memory(1)
            sim.memset(blocks[1].address, 2, 5 * MIB, b)
            sim.stream_delay(0)
            memsaver.pause()
            assert sim.counts().queued_operations == 0
        memsaver.resume()
        assert blocks[0].bytes() == bytes([1]) * (3 * MIB)
        assert blocks[1].bytes() == bytes([2]) * (5 * MIB)
        assert blocks[2].is_intact()
        del blocks
        assert resident() == (0, 0)
        assert sim.violations() == []
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


def test_ranges_of_two_devices_are_in_address_order(run_python):
    run_python(
        """
        import memsaver
        from memsaver import simulator

        kept = []
        for order in (0, 1), (1, 0):  # whichever way addresses are handed out
            with memsaver.region(f"tag {order}"):
                kept += [simulator.buffer(512, device) for device in order]
            ranges = memsaver.ranges(f"tag {order}")
            assert len(ranges) == 2 and list(ranges) == sorted(ranges)
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


# --- what changed while nobody looked -------------------------------------------------------------


def test_what_was_dead_is_saved_if_memory_changed_since(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [PAGE], backup="host")
    dead = [(block.address, PAGE)]
    looked = _C.changes()
    (another,) = make_blocks(name, [PAGE], backup="host")
    _C.pause([name], -1, dead, looked)
    memsaver.resume(name)
    assert block.is_intact() and another.is_intact()
    _C.pause([name], -1, dead, _C.changes())
    memsaver.resume(name)
    assert block.is_zero() and another.is_intact()


def test_callbacks_that_pause_further_tags_do_not_wait_for_each_other(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    for name in (first, second):
        make_blocks(name, [PAGE])
    inside, errors = threading.Event(), []

    def pause_the_other(_):
        inside.set()
        time.sleep(0.1)
        try:
            memsaver.pause(first)
        except InvalidStateError as error:
            errors.append(error)

    registered = memsaver.on_pause(pause_the_other, second)
    both = threading.Thread(target=lambda: (inside.wait(), memsaver.pause(first, second)))
    both.start()
    try:
        memsaver.pause(second)
    finally:
        registered.remove()
        both.join(20)
    assert not both.is_alive()
    assert memsaver.state(first) == memsaver.state(second) == "paused"
    memsaver.resume(first, second)


def test_a_pause_waits_for_other_devices(run_python):
    run_python(
        """
        import ctypes, memsaver
        from simulated_driver import Simulator
        from memsaver import simulator

        sim = Simulator()
        with memsaver.region("t"):
            here = simulator.buffer(2 << 20, 0)
        with memsaver.region("u"):
            there = simulator.buffer(2 << 20, 1)
        sim.stream_delay(0.2)
        library = sim.opened
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        assert library.cuDeviceGet(ctypes.byref(device), 1) == 0
        assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        assert library.cuCtxPushCurrent_v2(context) == 0
        assert library.cuStreamCreate(ctypes.byref(stream), 1) == 0
        copy = library.cuMemcpyDtoDAsync_v2
        copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        assert copy(there.address, here.address, 2 << 20, stream) == 0
        memsaver.pause("t")
        assert sim.violations() == [], sim.violations()
        """,
        MEMSAVER_SIM_DEVICES=2,
    )
