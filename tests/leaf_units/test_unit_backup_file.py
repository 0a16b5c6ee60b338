"""Tests backup files: writes, reads, holes and errors."""

import copy
import errno
import os
import pickle
import subprocess
import tempfile
from pathlib import Path

import pytest

import memsaver
from memsaver.errors import BackupError, ConfigError, error_of


@pytest.fixture
def disk(tmp_path):
    """Return a directory on a disk, in the file system of the tests' temporary directory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


@pytest.fixture
def memory_disk():
    """Yield a directory in tmpfs."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


MIB = 1 << 20
PRIVATE = "mode 600 links 0 close on exec 1, entries '', deleted"
ROUND_TRIP = [PRIVATE, "held 8", "wrong 0 held 8", "punched: right held 4"]


def test_many_threads_write_and_read_a_private_file(leaf, disk):
    said = leaf("file_round_trip", disk)
    assert said[:-1] == ROUND_TRIP and said[-1] in ("direct 0", "direct 1")
    assert not list(disk.iterdir())


def test_a_file_in_tmpfs_is_written_and_read(leaf, memory_disk):
    assert leaf("file_round_trip", memory_disk)[:-1] == ROUND_TRIP


@pytest.mark.parametrize(
    ("lacking", "said", "direct"),
    [
        ("unnamed files", ROUND_TRIP, "1"),
        ("direct transfers", ROUND_TRIP, "0"),
        ("direct reads", [*ROUND_TRIP, "it is no longer direct"], "0"),
        ("patience", ROUND_TRIP, "1"),
        ("direct transfers and patience", ROUND_TRIP, "0"),
        (
            "reservations",
            [PRIVATE, "held 0", "wrong 0 held 8", "not punched: right"],
            "1",
        ),
    ],
)
def test_a_file_where_the_system_lacks_something(leaf, disk, lacking, said, direct):
    usual = leaf("file_round_trip", disk)[-1]
    if usual == "direct 0":
        if lacking == "direct reads":
            pytest.skip("this file system has no direct transfers")
        direct = "0"
    assert leaf("file_round_trip", disk, LEAF_SYSTEM=lacking) == [*said, f"direct {direct}"]


def test_the_page_cache_is_not_filled(leaf, disk):
    # After 8 MiB are written and read without O_DIRECT, none of them stay in the page cache.
    assert leaf("file_cache", disk, LEAF_SYSTEM="direct transfers") == ["cached 0"]


def test_the_space_goes_with_the_file_and_not_with_a_forked_child(leaf, disk):
    assert leaf("file_fork", disk) == ["the contents are there", "blocks left 0"]


@pytest.mark.parametrize("lacking", ["nothing", "direct transfers"])
def test_reading_beyond_the_end_is_an_error(leaf, disk, lacking):
    never, cut = leaf("file_short", disk, LEAF_SYSTEM=lacking)
    for line, done in ((never, 0), (cut, 700000)):
        assert line.startswith(f"error 6 needed {MIB} free 0 errno {errno.EIO}: reading the 1 MiB")
        assert f"the file ends after {done} of these bytes" in line and str(disk)[:30] in line


def test_unaligned_transfers_are_rejected(leaf, disk):
    said = leaf("file_misuse", disk)
    assert len(said) == 6 and said[5] == "0"
    for line in said[:5]:
        assert line.startswith("error 11 ") and "not aligned to 4096 bytes" in line


@pytest.mark.parametrize("lacking", ["nothing", "direct transfers"])
def test_the_limit_of_file_sizes_is_an_error_and_no_signal(leaf, disk, lacking):
    said = leaf("file_limit", disk, LEAF_SYSTEM=lacking)
    for line, verb, needed in zip(
        said, ("reserving", "writing", "writing"), (2 * MIB, 2 * MIB, MIB), strict=False
    ):
        assert line.startswith(f"error 6 needed {needed} free 0 errno {errno.EFBIG}: {verb} the ")
        assert "ulimit -f" in line
    assert said[3:] == ["blocked 0 pending 0"]


def test_a_bad_disk_is_an_error(leaf, disk):
    (line,) = leaf("file_write", disk, MIB, LEAF_SYSTEM="a good disk")
    assert line.startswith(f"error 6 needed {MIB} free 0 errno {errno.EIO}: writing the 1 MiB")


def test_a_full_disk_is_an_error_before_anything_is_lost(program, leaf, disk):
    mount = 'mount -t tmpfs -o size=4m none "$FOLDER"'
    for namespace in (["unshare", "-m"], ["unshare", "-rm"]):
        command = [
            *namespace,
            "sh",
            "-c",
            f'{mount} && exec "$@"',
            "sh",
            program,
            "file_full",
            disk,
        ]
        done = subprocess.run(
            command, env={**os.environ, "FOLDER": str(disk)}, capture_output=True, text=True
        )
        if done.returncode == 0:
            break
    else:
        pytest.skip(f"a small file system cannot be mounted: {done.stderr}")
    said = done.stdout.splitlines()
    assert said[0].startswith(f"error 6 needed {4 * MIB} free ")
    assert f" errno {errno.ENOSPC}: reserving the 4 MiB" in said[0]
    assert "No space left on device (2 MiB" in said[0] and "disk_dir" in said[0]
    assert said[1:3] == ["what was there stays", "held 2"]
    assert f" errno {errno.ENOSPC}: writing the 2 MiB" in said[3]


def test_a_full_disk_where_space_cannot_be_reserved(leaf, disk):
    said = leaf("file_reserve", disk, 1 << 60, LEAF_SYSTEM="reservations")
    assert said[0].startswith(f"error 6 needed {1 << 60} free ")
    assert f"errno {errno.ENOSPC}" in said[0]
    said = leaf("file_reserve", disk, MIB)
    assert said == [f"held {MIB}"]


def test_the_directory_of_a_file(leaf, disk, tmp_path):
    assert leaf("file_directory", disk, TMPDIR="/nowhere") == [str(disk)]
    assert leaf("file_directory", "", TMPDIR=disk) == [str(disk)]
    usual = "/var/tmp" if os.access("/var/tmp", os.W_OK) else "/tmp"
    for nothing in ("/nowhere", "", program_file(tmp_path)):
        assert leaf("file_directory", "", TMPDIR=nothing) == [usual]
    (line,) = leaf("file_directory", tmp_path / "absent")
    assert line.startswith(f"error 6 needed 0 free 0 errno {errno.ENOENT}: creating a backup file")


def program_file(folder):
    path = folder / "file"
    path.write_text("")
    return path


def test_an_error_of_a_file_is_an_oserror():
    error = error_of(6, "writing failed", 0, "", "weights", 4096, 512, errno.ENOSPC)
    for one in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(one, BackupError) and isinstance(one, OSError)
        assert (one.errno, one.strerror) == (errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert (error.os_error, error.needed, error.free) == (errno.ENOSPC, 4096, 512)
    assert str(error) == "writing failed" and error.tag == "weights"
    plain = error_of(6, "of no file", 0, "", "", 0, 0, 0)
    assert (plain.errno, plain.strerror, plain.os_error) == (None, None, 0)


def test_the_systems_reason_crosses_the_abi():
    with pytest.raises(ConfigError) as caught:
        memsaver.configure(disk_dir="/nowhere")
    assert caught.value.os_error == errno.ENOENT
    with pytest.raises(ConfigError) as caught:
        memsaver.configure(fingerprints="maybe")
    assert caught.value.os_error == 0
