"""Tests resumes that restore no contents, because the contents are about to be overwritten."""

import pytest
from looks import intact, row_of

import memsaver

MIB = 1 << 20
SIZES = [MIB // 2, 3 * MIB, 5 * MIB + 4096]


@pytest.mark.parametrize("backup", ["host", "pageable", "disk", "none"])
@pytest.mark.parametrize("wait", [True, False])
def test_contents_are_not_copied_and_read_as_zero(sim, tag, make_blocks, backup, wait):
    name = tag()
    blocks = make_blocks(name, SIZES, backup=backup)
    memsaver.pause(name)
    report = memsaver.resume(name, restore=False, wait=wait)
    report = report if wait else report.wait()
    assert report.changed == (name,) and report.copied_bytes == 0
    assert report.bytes == row_of(name).resident_bytes >= sum(SIZES)
    assert all(block.is_zero() for block in blocks)
    # What is written then is saved and restored like any contents.
    for seed, block in enumerate(blocks, 40):
        block.fill(seed)
    memsaver.pause(name)
    memsaver.resume(name)
    assert intact(blocks) == (backup != "none")


def test_contents_that_are_written_again_as_they_were_are_not_saved_again(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, SIZES, backup="host")
    memsaver.pause(name)
    memsaver.resume(name, restore=False)
    for seed, block in enumerate(blocks):
        block.fill(seed)
    first = memsaver.pause(name).copied_bytes
    memsaver.resume(name, restore=False)
    assert first > 0 and all(block.is_zero() for block in blocks)
    for seed, block in enumerate(blocks):
        block.fill(seed)
    assert memsaver.pause(name).copied_bytes == 0
    memsaver.resume(name)
    assert intact(blocks)


def test_a_failed_resume_keeps_the_backup(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, SIZES, backup="host")
    memsaver.pause(name)
    for call in ("cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        with sim.fault(call, sim.OUT_OF_MEMORY):
            with pytest.raises(memsaver.MemsaverError):
                memsaver.resume(name, restore=False)
        assert memsaver.state(name) == "paused" and sim.tag_bytes() == 0
    memsaver.resume(name)
    assert intact(blocks)
    assert not memsaver.resume(name, restore=False).changed  # mapped tags stay as they are
    assert intact(blocks)


def test_unrestored_memory_is_poisoned_if_requested(sim, tag, make_blocks, options):
    (block,) = make_blocks(name := tag(), [MIB], backup="host")
    memsaver.pause(name)
    options(poison=True)
    memsaver.resume(name, restore=False)
    assert block.bytes() == b"\xff" * MIB
