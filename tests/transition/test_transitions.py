"""Tests pauses and resumes: contents, addresses, selected tags, `paused()` and two devices."""

import contextlib

import pytest
from looks import row_of

import memsaver
from memsaver import simulator
from memsaver.errors import UnknownTagError

MIB = 1 << 20
PAGE = 2 * MIB
SIZES = [1, 511, 512, 513, 4096, 100_000, MIB, PAGE - 512, PAGE, PAGE + 1, 5 * MIB + 77]


# --- contents and addresses -----------------------------------------------------------------------


def test_backed_up_contents_are_restored(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, SIZES, backup="host")
    where = memsaver.ranges(name)
    for cycle in range(4):
        memsaver.pause(name)
        assert memsaver.state(name) == "paused"
        assert not any(sim.accessible(b.address) for b in blocks)
        assert sim.tag_bytes() == 0
        assert memsaver.ranges(name) == where
        memsaver.resume(name)
        assert memsaver.state(name) == "mapped"
        assert all(b.is_intact() for b in blocks)
        for b in blocks[cycle % 2 :: 2]:  # the next resume restores the new contents
            b.fill(b.seed + 1000)
    assert memsaver.ranges(name) == where


def test_contents_without_a_backup_read_as_zero(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, SIZES, backup="none")
    for _ in range(3):
        memsaver.pause(name)
        assert sim.tag_bytes() == 0
        memsaver.resume(name)
        assert all(b.is_zero() for b in blocks)
        for b in blocks:
            b.fill(b.seed + 1)


def test_a_resume_shows_nothing_of_other_memory(sim, tag, make_blocks):
    # The resume must clear pages that another tag wrote to.
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
    blocks = make_blocks(name, [4096, 4 * MIB], backup=policy)
    for backup, kept in ((override, override), (None, policy)):
        memsaver.pause(name, backup=backup)
        assert row_of(name).backup == policy
        assert row_of(name).backup_bytes == (4096 + 4 * MIB if kept == "host" else 0)
        memsaver.resume(name)
        for b in blocks:
            assert b.is_intact() if kept == "host" else b.is_zero()
            b.fill(b.seed + 1)


def test_contents_that_span_pieces_and_copy_chunks(sim, tag, make_blocks, options):
    # Larger than a copy chunk of the host backup (64 MiB), and than a shared piece.
    options(share_bytes="2MiB", slab_bytes="2MiB")
    name = tag()
    blocks = make_blocks(name, [66 * MIB, 512, 3 * MIB + 512], backup="host")
    memsaver.pause(name)
    memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)
    options(share_bytes="1GiB", slab_bytes="1GiB")
    memsaver.pause(name)
    memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)


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


def test_pausing_a_paused_tag_does_nothing_and_reports_so(sim, tag, make_blocks):
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
    memsaver.pause(first, backup="none")  # does not change the backup either
    memsaver.resume(first, second)
    assert all(b.is_intact() for b in blocks)


def test_resuming_a_mapped_tag_does_nothing_and_reports_so(sim, tag, make_blocks):
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
    for call in (memsaver.pause, memsaver.resume, lambda *tags: memsaver.paused(*tags).__enter__()):
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
            end = "known tags: 'weights', 'kv_cache'; did you mean 'weights'?"
            assert str(error).endswith(end), str(error)
            assert isinstance(error, KeyError) and isinstance(error, memsaver.MemsaverError)
        else:
            raise AssertionError
        """
    )


# --- paused() -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, None])
def test_paused_is_a_pause_and_a_resume_even_after_an_exception(sim, tag, make_blocks, error):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    with pytest.raises(error, match="mine") if error else contextlib.nullcontext():
        with memsaver.paused(name) as report:
            assert report.changed == (name,) and memsaver.state(name) == "paused"
            if error:
                raise error("mine")
    assert memsaver.state(name) == "mapped" and block.is_intact()


def test_paused_does_not_resume_tags_that_were_already_paused(sim, tag, make_blocks):
    before, now = tag("before"), tag("now")
    make = [make_blocks(before, [MIB], backup="host"), make_blocks(now, [MIB], backup="host")]
    memsaver.pause(before)
    with memsaver.paused(before, now) as report:
        assert report.changed == (now,)
    assert memsaver.state(before) == "paused"
    assert memsaver.state(now) == "mapped"
    with memsaver.paused(before):  # pauses nothing, so it must resume nothing
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
