"""Fixtures for the tests of backups."""

import textwrap

import pytest
from backup_files import deleted_files
from peer_scene import CODE

import memsaver

MIB = 1 << 20


@pytest.fixture
def on_disk(sim, tag, make_blocks, options, tmp_path):
    """Return a function that creates a tag and pauses it to disk.

    The function returns the tag's name, blocks and file descriptor.
    """

    def make(sizes=(18 * MIB, 5000)):
        options(disk_dir=tmp_path)
        others = deleted_files(tmp_path)
        blocks = make_blocks(name := tag(), list(sizes), backup="disk")
        memsaver.pause(name)
        (file,) = set(deleted_files(tmp_path)) - set(others)
        return name, blocks, file

    return make


@pytest.fixture
def run(run_python):
    """Run code with `peer_scene` in a process with several devices."""

    def run(code: str, devices: int = 2, **env: object):
        code = CODE + textwrap.dedent(code)
        return run_python(code, with_memsaver=True, MEMSAVER_SIM_DEVICES=devices, **env)

    return run
