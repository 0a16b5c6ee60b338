"""Tests that files are replaced atomically, and tests the files' access rights at every moment."""

import errno
import os
import stat
import sys

import pytest

from memsaver._runtime.whole_files import replace_file


@pytest.fixture
def rights_seen(tmp_path):
    """Return a function that runs an action and returns all modes that the action's new files
    had.
    """

    def watch(action):
        there, seen = set(os.listdir(tmp_path)), set()

        def look(*_):
            for name in set(os.listdir(tmp_path)) - there:
                seen.add(stat.S_IMODE(os.stat(tmp_path / name).st_mode))

        before = os.umask(0)
        sys.setprofile(look)
        try:
            action()
        finally:
            sys.setprofile(None)
            os.umask(before)
        return seen

    return watch


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640, 0o644, 0o666])
def test_a_replaced_file_is_never_accessible_to_more_users(tmp_path, rights_seen, mode):
    target = tmp_path / "saved"
    target.write_bytes(b"before")
    target.chmod(mode)
    seen = rights_seen(lambda: replace_file(target, b"after"))
    assert seen and all(rights & 0o077 & ~mode == 0 for rights in seen), [oct(r) for r in seen]
    assert target.read_bytes() == b"after" and stat.S_IMODE(target.stat().st_mode) == mode
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o027])
def test_a_new_files_mode_follows_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        replace_file(tmp_path / "saved", b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "saved").stat().st_mode) == 0o666 & ~mask


@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of others")
def test_a_replaced_file_keeps_its_owner(tmp_path):
    target = tmp_path / "saved"
    target.write_bytes(b"before")
    os.chown(target, 1234, 2345)
    target.chmod(0o640)
    replace_file(target, b"after")
    facts = target.stat()
    assert (facts.st_uid, facts.st_gid, stat.S_IMODE(facts.st_mode)) == (1234, 2345, 0o640)


def test_a_group_that_cannot_be_kept_gives_no_other_group_rights(tmp_path, monkeypatch):
    target = tmp_path / "saved"
    target.write_bytes(b"before")
    target.chmod(0o660)

    class Other:
        st_uid, st_gid, st_mode = 1234, 2345, target.stat().st_mode

    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chown", refuse)
    monkeypatch.setattr(type(target), "stat", lambda *_, **__: Other)
    replace_file(target, b"after")
    monkeypatch.undo()
    assert stat.S_IMODE(target.stat().st_mode) == 0o600 and target.read_bytes() == b"after"


def test_a_mount_point_is_written_in_place(tmp_path, monkeypatch):
    target = tmp_path / "saved"
    target.write_bytes(b"before")

    def refuse(*_):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(os, "replace", refuse)
    replace_file(target, b"after")
    assert target.read_bytes() == b"after" and os.listdir(tmp_path) == ["saved"]
