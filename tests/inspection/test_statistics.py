"""Tests the statistics other than resident bytes: totals, rates and fingerprint hits."""

import dataclasses

import pytest

import memsaver
from build_support import usage_fields
from memsaver import TagStats
from memsaver._runtime.native import _C

pytestmark = pytest.mark.each_python

MIB = 1 << 20


def row_of(name):
    (row,) = memsaver.stats()[name]
    return row


def test_totals_are_the_sums_of_the_reports(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [3 * MIB, 5 * MIB], backup="host")
    out = into = saved = restored = out_seconds = into_seconds = 0
    for round_number in range(3):
        for block in blocks:
            block.fill(100 + round_number)
        report = memsaver.pause(name)
        row = row_of(name)
        assert (row.last_paused_bytes, row.last_saved_bytes) == (report.bytes, report.copied_bytes)
        assert 0 < row.last_pause_seconds <= report.seconds
        out, saved, out_seconds = (
            out + report.bytes,
            saved + report.copied_bytes,
            out_seconds + row.last_pause_seconds,
        )
        report = memsaver.resume(name)
        row = row_of(name)
        assert row.last_resumed_bytes == report.bytes > 0
        assert row.last_restored_bytes == report.copied_bytes > 0
        into, restored, into_seconds = (
            into + report.bytes,
            restored + report.copied_bytes,
            into_seconds + row.last_resume_seconds,
        )
    row = row_of(name)
    assert (row.paused_bytes, row.saved_bytes) == (out, saved)
    assert (row.resumed_bytes, row.restored_bytes) == (into, restored)
    assert row.pause_seconds == pytest.approx(out_seconds)
    assert row.resume_seconds == pytest.approx(into_seconds)
    assert (row.pauses, row.resumes, row.failures) == (3, 3, 0)


def test_paused_bytes_are_reported(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    kept = make_blocks(first, [4 * MIB], backup="host") + make_blocks(second, [6 * MIB])
    assert memsaver.stats().paused_now_bytes == row_of(first).paused_now_bytes == 0
    memsaver.pause(first)
    assert row_of(first).paused_now_bytes == memsaver.stats().paused_now_bytes == 4 * MIB
    memsaver.pause(second)
    assert memsaver.stats().paused_now_bytes == 10 * MIB
    memsaver.resume(first)
    assert row_of(first).paused_now_bytes == 0 and row_of(second).paused_now_bytes == 6 * MIB
    assert kept[0].is_intact()


def test_figures_read_as_lines(sim, tag, make_blocks):
    name = tag("weights")
    kept = make_blocks(name, [4 * MIB], backup="host")
    report = memsaver.pause(name)
    assert str(report) == f"{name}: 4 MiB, 4 MiB copied, in {1e3 * report.seconds:,.1f} ms"
    assert str(row_of(name)) == (
        f"{name} on device 0: paused, 0 bytes resident, 4 MiB paused, "
        "4 MiB of backups in host memory"
    )
    assert str(row_of(name)) in str(memsaver.stats()).splitlines()
    assert str(memsaver.pause(name)).startswith("nothing changed: 0 bytes")
    assert len(kept) == 1


def test_rates_are_bytes_by_seconds(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [6 * MIB], backup="host")
    row = row_of(name)
    rates = (
        row.last_pause_rate,
        row.last_resume_rate,
        row.last_save_rate,
        row.last_restore_rate,
    )
    assert rates == (0, 0, 0, 0)
    memsaver.pause(name)
    memsaver.resume(name)
    row = row_of(name)
    assert row.last_pause_rate == row.last_paused_bytes / row.last_pause_seconds > 0
    assert row.last_resume_rate == row.last_resumed_bytes / row.last_resume_seconds > 0
    assert row.last_save_rate == row.last_saved_bytes / row.last_pause_seconds > 0
    assert row.last_restore_rate == row.last_restored_bytes / row.last_resume_seconds > 0
    assert blocks[0].is_intact()


def test_unchanged_pieces_of_a_pause_are_counted(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [4 * MIB, 4 * MIB], backup="host")
    memsaver.pause(name)
    row = row_of(name)
    assert (row.last_unchanged_pieces, row.last_unchanged_bytes, row.unchanged_bytes) == (0, 0, 0)
    memsaver.resume(name)
    memsaver.pause(name)
    row = row_of(name)
    assert (row.last_unchanged_pieces, row.last_unchanged_bytes) == (8, 8 * MIB)
    assert row.last_saved_bytes == 0
    memsaver.resume(name)
    blocks[0].sim.write(blocks[0].address + MIB, b"other")
    memsaver.pause(name)
    row = row_of(name)
    assert (row.last_unchanged_pieces, row.last_unchanged_bytes) == (7, 7 * MIB)
    assert row.last_saved_bytes == MIB
    assert (row.unchanged_pieces, row.unchanged_bytes) == (15, 15 * MIB)


def test_a_swap_counts_on_both_sides(sim, tag, make_blocks):
    going, coming = tag("going"), tag("coming")
    blocks = make_blocks(coming, [4 * MIB], backup="host")
    memsaver.pause(coming)
    blocks += make_blocks(going, [6 * MIB], backup="host")
    report = memsaver.swap(out=going, into=coming)
    changes = {change.tag: change for change in report.changes}
    out, into = row_of(going), row_of(coming)
    assert out.last_paused_bytes == out.paused_bytes == changes[going].device_bytes == 6 * MIB
    assert out.last_saved_bytes == changes[going].copied_bytes == 6 * MIB
    assert into.last_resumed_bytes == into.resumed_bytes == changes[coming].device_bytes
    assert into.last_restored_bytes == changes[coming].copied_bytes == 4 * MIB
    assert out.last_pause_seconds == into.last_resume_seconds == out.pause_seconds > 0
    memsaver.resume(going)
    assert all(block.is_intact() for block in blocks)


def test_failures_are_counted_and_nothing_else_of_them(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [4 * MIB], backup="host")
    with sim.fault("cuMemUnmap"), pytest.raises(memsaver.DriverError):
        memsaver.pause(name)
    row = row_of(name)
    assert (row.failures, row.pauses, row.paused_bytes, row.saved_bytes) == (1, 0, 0, 0)
    assert (row.last_pause_seconds, row.pause_seconds, row.state) == (0, 0, "mapped")
    memsaver.pause(name)
    with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
        with pytest.raises(memsaver.OutOfDeviceMemoryError):
            memsaver.resume(name)
    row = row_of(name)
    assert (row.failures, row.resumes, row.resumed_bytes, row.resume_seconds) == (2, 0, 0, 0)
    memsaver.resume(name)
    assert row_of(name).failures == 2 and blocks[0].is_intact()


def test_bytes_are_of_the_device_and_counters_of_the_tag(run_python):
    run_python(
        """
        import memsaver
        from memsaver import simulator

        MIB = 1 << 20
        with memsaver.region("t", backup="host"):
            held = [simulator.buffer(4 * MIB, 0), simulator.buffer(6 * MIB, 1)]
        memsaver.pause("t")
        memsaver.resume("t")
        first, second = memsaver.stats()["t"]
        assert (first.device, second.device) == (0, 1)
        assert (first.paused_bytes, second.paused_bytes) == (4 * MIB, 6 * MIB)
        assert (first.restored_bytes, second.restored_bytes) == (4 * MIB, 6 * MIB)
        assert first.pauses == second.pauses == 1
        assert first.pause_seconds == second.pause_seconds > 0
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


def test_tag_stats_has_the_fields_of_the_c_header():
    module = usage_fields.MODULE.read_text()
    assert len(usage_fields.fields(usage_fields.HEADER.read_text())) > 20
    assert module == usage_fields.written(module, usage_fields.HEADER.read_text())


def test_a_row_is_what_the_constructor_makes(tag, make_paused):
    blocks = make_paused(name := tag())
    (row,) = memsaver.stats()[name]
    made = TagStats(**{field.name: getattr(row, field.name) for field in dataclasses.fields(row)})
    assert vars(row) == vars(made) and hash(row) == hash(made)
    assert [one["tag"] for one in _C.stats(name)] == [name] and _C.stats("no such tag") == []
    del blocks


@pytest.mark.parametrize("device", [-1, True, 9, "cpu", 1.5, None])
def test_other_values_are_no_device(sim, tag, device):
    name = tag()
    with memsaver.region(name):
        pass
    for call in (memsaver.device_memory, lambda device: memsaver.ranges(name, device)):
        if device is None and call is not memsaver.device_memory:
            continue  # all devices
        with pytest.raises(memsaver.ConfigError):
            call(device)


def test_a_device_is_named_as_in_regions(sim, tag):
    name = tag()
    with memsaver.region(name):
        block = memsaver.simulator.buffer(4096)
    assert memsaver.device_memory("cuda:0") == memsaver.device_memory("cuda")
    assert memsaver.ranges(name, "cuda:0") == memsaver.ranges(name) != ()
    with pytest.raises(memsaver.ConfigError, match="cuda:0"):
        memsaver.ranges(name, "cuda")
    assert block
