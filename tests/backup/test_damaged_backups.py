"""Tests disk backups that are corrupted while tags are paused, and the recovery from the
corruption.
"""

import errno
import os

import pytest
from backup_files import deleted_files, first_data, flip, overwrite, truncate
from looks import intact
from simulated_driver import Block

import memsaver
from memsaver.errors import BackupError

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20


def saved_bytes(name):
    """Return the number of bytes that a pause saves: live allocations, rounded as by the
    allocator.
    """
    return sum(each.bytes for each in memsaver.ranges(name))


def load_again(sim, name, blocks):
    """Follow the error's advice: free the tensors, resume, and load the same contents again.

    The new blocks have the same addresses as the old blocks.
    """
    known = [(block.address, block.nbytes, block.seed) for block in blocks]
    blocks.clear()
    memsaver.resume(name)
    with memsaver.region(name):
        blocks += [Block(sim, nbytes, seed) for _, nbytes, seed in known]
    assert [block.address for block in blocks] == [address for address, _, _ in known]


def refused(sim, name, match):
    """Check that a resume detects the corruption, gives advice, and changes nothing."""
    with pytest.raises(BackupError, match=match) as caught:
        memsaver.resume(name)
    assert caught.value.tag == name and "load its contents" in str(caught.value)
    assert memsaver.state(name) == "paused" and sim.tag_bytes() == 0
    return caught.value


DAMAGES = {
    "first byte": lambda file, start: flip(file, start),
    "a later byte": lambda file, start: flip(file, start + 17 * MIB + 5),
    "one byte in each piece": lambda file, start: [
        flip(file, start + i * MIB + 7) for i in range(18)
    ],
    "zeros": lambda file, start: overwrite(file, start + 3 * MIB, bytes(2 * MIB)),
    "cut": lambda file, start: truncate(file, start + 7 * MIB + 100),
    "emptied": lambda file, start: truncate(file, 0),
}
MATCH = "is corrupt|ends after"


# --- detection ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 17 * MIB + 5])
@pytest.mark.parametrize("fingerprints", [True, False], ids=["device", "host"])
def test_a_corrupted_byte_is_found(sim, options, on_disk, fingerprints, at):
    options(fingerprints=fingerprints)
    name, blocks, file = on_disk()
    where = first_data(file) + at
    flip(file, where)
    for _ in range(2):
        refused(sim, name, "is corrupt")
        assert not sim.accessible(blocks[0].address)
    flip(file, where)
    memsaver.resume(name)
    assert intact(blocks)


def test_a_truncated_file_is_found(sim, on_disk):
    name, blocks, file = on_disk()
    cut, size = first_data(file) + 7 * MIB + 100, os.fstat(file).st_size
    with open(f"/proc/self/fd/{file}", "r+b", buffering=0) as again:
        again.seek(cut)
        lost = again.read()
        truncate(file, cut)
        assert refused(sim, name, "ends after").errno == errno.EIO
        again.seek(cut)
        again.write(lost)
    assert os.fstat(file).st_size == size
    memsaver.resume(name)
    assert intact(blocks)


# --- recovery -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fingerprints, damage",
    [*((True, damage) for damage in DAMAGES.values()), (False, next(iter(DAMAGES.values())))],
    ids=[*DAMAGES, "fingerprints on the host"],
)
def test_contents_loaded_again_are_saved_again(
    sim, options, on_disk, tmp_path, fingerprints, damage
):
    options(fingerprints=fingerprints)
    name, blocks, file = on_disk()
    damage(file, first_data(file))
    refused(sim, name, MATCH)
    load_again(sim, name, blocks)
    assert memsaver.pause(name).copied_bytes == saved_bytes(name)
    memsaver.resume(name)
    assert intact(blocks)
    assert memsaver.pause(name).copied_bytes == (0 if fingerprints else saved_bytes(name))
    (file,) = deleted_files(tmp_path)
    flip(file, first_data(file) + MIB)  # the new copy is checked too
    refused(sim, name, "is corrupt")


def test_a_backup_that_was_damaged_and_is_whole_again_is_not_trusted(sim, on_disk):
    name, blocks, file = on_disk()
    flip(file, first_data(file))
    refused(sim, name, "is corrupt")
    flip(file, first_data(file))
    memsaver.resume(name)
    assert intact(blocks)
    assert memsaver.pause(name).copied_bytes == saved_bytes(name)
    memsaver.resume(name)
    assert intact(blocks)


def test_an_undamaged_part_of_a_damaged_backup_is_checked_and_restored(sim, on_disk):
    name, blocks, file = on_disk([4 * MIB, 6 * MIB, 2 * MIB])
    start = first_data(file)
    flip(file, start + 5 * MIB)
    refused(sim, name, "is corrupt")
    del blocks[1]
    flip(file, start + 11 * MIB)
    refused(sim, name, "is corrupt")
    flip(file, start + 11 * MIB)
    memsaver.resume(name)
    assert intact(blocks)
    assert memsaver.pause(name).copied_bytes == saved_bytes(name) == 6 * MIB
    memsaver.resume(name)
    assert intact(blocks)


def test_damage_of_one_tag_leaves_the_backups_of_others(sim, on_disk):
    (damaged, blocks, file), (whole, others, _) = on_disk(), on_disk()
    flip(file, first_data(file))
    with pytest.raises(BackupError) as caught:
        memsaver.resume(damaged, whole)
    assert caught.value.tag == damaged
    load_again(sim, damaged, blocks)
    memsaver.resume(whole)
    report = memsaver.pause(damaged, whole)
    assert {each.tag: each.copied_bytes for each in report.changes} == {
        damaged: saved_bytes(damaged),
        whole: 0,
    }
    memsaver.resume(damaged, whole)
    assert intact(blocks) and intact(others)


def test_a_swap_finds_damage(sim, tag, make_blocks, on_disk):
    name, blocks, file = on_disk()
    goes = make_blocks(out := tag("out"), [20 * MIB], backup="disk")
    flip(file, first_data(file))
    with pytest.raises(BackupError, match="is corrupt") as caught:
        memsaver.swap(out=out, into=name)
    assert caught.value.tag == name
    assert memsaver.state(name) == "paused"
    memsaver.resume(out)
    assert intact(goes)
    load_again(sim, name, blocks)
    memsaver.swap(out=name, into=out)
    memsaver.swap(out=out, into=name)
    assert intact(blocks)
    memsaver.resume(out)
    assert intact(goes)


@pytest.mark.parametrize("backup", ["none", "host", "pageable"])
def test_after_damage_and_another_backup_a_disk_pause_saves_everything(sim, on_disk, backup):
    name, blocks, file = on_disk()
    flip(file, first_data(file))
    refused(sim, name, "is corrupt")
    load_again(sim, name, blocks)
    memsaver.pause(name, backup=backup)
    memsaver.resume(name)
    if backup == "none":
        for block in blocks:
            block.fill(block.seed)
    assert memsaver.pause(name, backup="disk").copied_bytes == saved_bytes(name)
    memsaver.resume(name)
    assert intact(blocks)


def test_after_damage_on_one_of_two_devices_both_are_saved_again(run_python, tmp_path):
    run_python(
        f"""
        import os
        import memsaver
        from backup_files import deleted_files, first_data, flip
        from simulated_driver import Block, Simulator

        sim = Simulator()
        memsaver.configure(disk_dir={str(tmp_path)!r})

        def load():
            made = []
            for device in (0, 1):
                with memsaver.region("t", backup="disk"):
                    made.append(Block(sim, 6 << 20, 10 + device, device))
            return made

        for device in (0, 1):
            sim.start(device)
        blocks = load()
        for damaged in ((0,), (1,), (0, 1)):
            memsaver.pause("t")
            files = deleted_files({str(tmp_path)!r})
            for file in files:
                start = first_data(file)
                with open(f"/proc/self/fd/{{file}}", "rb") as opened:
                    first = os.pread(opened.fileno(), 64, start)
                (device,) = [d for d in (0, 1) if blocks[d].expected().startswith(first)]
                if device in damaged:
                    flip(file, start + (1 << 20))
            try:
                memsaver.resume("t")
            except memsaver.BackupError as error:
                assert error.tag == "t", error
            else:
                raise AssertionError("the damage was not found")
            assert sim.tag_bytes(0) == sim.tag_bytes(1) == 0
            for file in files:
                flip(file, first_data(file) + (2 << 20))
            blocks.clear()
            memsaver.resume("t")
            blocks += load()
            copied = {{each.device: each.copied_bytes for each in memsaver.pause("t").changes}}
            assert copied == {{0: 6 << 20, 1: 6 << 20}}, copied
            memsaver.resume("t")
            assert all(block.is_intact() for block in blocks)
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


# --- writes that fail -----------------------------------------------------------------------------


def test_after_a_failed_write_another_directory_is_used(tmp_path, run_python):
    run_python(
        f"""
        import errno, os, resource
        import memsaver
        from backup_files import deleted_files
        from simulated_driver import Block, Simulator

        sim = Simulator()
        memsaver.configure(disk_dir={str(tmp_path)!r})
        with memsaver.region("t", backup="disk"):
            blocks = [Block(sim, 3 << 20, 1)]
        with memsaver.paused("t"):
            pass
        with memsaver.region("t"):
            blocks.append(Block(sim, 3 << 20, 2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (5 << 20, resource.RLIM_INFINITY))
        try:
            memsaver.pause("t")
        except memsaver.BackupError as error:
            assert error.errno == errno.EFBIG and "another directory" in str(error), error
        else:
            raise AssertionError("not refused")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        os.mkdir(other := {str(tmp_path / "other")!r})
        memsaver.configure(disk_dir=other)
        memsaver.pause("t")
        assert len(deleted_files(other)) == 1
        assert len(deleted_files({str(tmp_path)!r})) == 1
        memsaver.resume("t")
        assert all(block.is_intact() for block in blocks)
        """
    )
