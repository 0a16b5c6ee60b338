"""Tests `memsaver doctor`'s findings about the backup directory."""

import os

import pytest
from doctors import of, raising

from memsaver.cli.checks import disk


def test_the_directory_of_backups(options, tmp_path):
    options(disk_dir=str(tmp_path))
    found = disk.check_disk()
    assert of(found, "disk_dir").data["directory"] == os.path.realpath(tmp_path)
    assert of(found, "disk_dir").data["is_default"] is False
    facts = os.statvfs(tmp_path)
    free = of(found, "disk_dir space").data["free_bytes"]
    assert abs(free - facts.f_bavail * facts.f_frsize) < 1 << 30
    assert list(tmp_path.iterdir()) == []


def test_the_default_directory_follows_tmpdir(plain, tmp_path):
    plain.setenv("TMPDIR", str(tmp_path))
    assert of(disk.check_disk(), "disk_dir").data["directory"] == str(tmp_path)
    plain.setenv("TMPDIR", str(tmp_path / "missing"))
    assert of(disk.check_disk(), "disk_dir").data["directory"] in ("/var/tmp", "/tmp")


@pytest.mark.parametrize(
    "env",
    [
        {"TMPDIR": None},
        {"TMPDIR": ""},
        {"TMPDIR": "there"},
        {"TMPDIR": "missing"},
        {"TMPDIR": "file"},
        {"TMPDIR": "missing", "MEMSAVER_DISK_DIR": "there"},
        {"TMPDIR": "there", "MEMSAVER_DISK_DIR": ""},
    ],
    ids=str,
)
def test_the_reported_directory_is_that_of_backups(run_python, tmp_path, env):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    done = run_python(
        """
        import os
        import memsaver
        from memsaver.cli.checks.disk import check_disk
        from simulated_driver import Block, Simulator

        def files():
            links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
            return {os.readlink(link) for link in links if os.path.lexists(link)}

        sim = Simulator()
        sim.start()
        with memsaver.region("t", backup="disk"):
            block = Block(sim, 4 << 20, 1)
        before = files()
        memsaver.pause("t")
        (backup,) = {file for file in files() - before if file.endswith(" (deleted)")}
        print(os.path.dirname(backup))
        (said,) = [found for found in check_disk() if found.name == "disk_dir"]
        print(os.path.realpath(said.data["directory"]))
        """,
        **{name: value and str(tmp_path / value) for name, value in env.items()},
    )
    backup, said = done.stdout.splitlines()
    assert backup == said and said in ("/tmp", "/var/tmp", str(tmp_path / "there"))


@pytest.mark.parametrize("name", ["memory", "in memory"])
def test_a_directory_in_memory(system, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    system({"/proc/self/mountinfo": f"1 0 0:1 / {point} rw - tmpfs tmpfs rw\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        found = of(disk.check_disk(), "disk_dir")
    assert found.level == "warned" and "stay in memory" in found.advice


def test_a_file_system_without_private_files_or_direct_io(plain, tmp_path):
    plain.setenv("TMPDIR", str(tmp_path))
    real = os.open

    def refuse_unnamed(path, flags, *mode, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "not supported")
        return real(path, flags, *mode, **named)

    plain.setattr(os, "open", refuse_unnamed)
    plain.setattr(os, "pwritev", raising(OSError(22, "invalid")))
    found = disk.check_disk()
    assert of(found, "disk_dir privacy").level == "warned"
    assert of(found, "disk_dir direct I/O").data == {"direct": False}
    assert list(tmp_path.iterdir()) == []
