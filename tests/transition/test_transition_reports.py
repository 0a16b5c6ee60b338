"""Tests the reports of pauses and resumes, and the related statistics."""

from looks import row_of

import memsaver

MIB = 1 << 20
PAGE = 2 * MIB


def test_reports_equal_the_drivers_figures(sim, tag, make_blocks):
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
    alive = {name: make_blocks(name, [MIB, 3 * MIB, 8 * MIB], backup="host") for name in names}

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


def test_a_row_of_statistics_counts_blocks_pages_and_backups(sim, tag, make_blocks):
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
    assert memsaver.ranges(name, device=0) == memsaver.ranges(name)
    del blocks[0]
    assert sorted(memsaver.ranges(name)) == sorted(expected[1:])
