"""Tests `preload_env` and `preload`: the environment of preloaded children."""

import multiprocessing
import os
import sys
from typing import get_args

import pytest
from preloading import LIBRARY

import memsaver
from memsaver._memory.preload import is_preloaded, preload, preload_env
from memsaver.errors import ConfigError, NotLoadedError

pytestmark = pytest.mark.each_python


@pytest.mark.preloads
def test_env_puts_the_library_first_and_keeps_the_rest():
    ours = str(LIBRARY.resolve())
    assert preload_env(env={}) == {"LD_PRELOAD": ours}
    assert preload_env(env={"LD_PRELOAD": "a.so b.so:c.so"})["LD_PRELOAD"] == (
        f"{ours}:a.so:b.so:c.so"
    )
    for present in (ours, f"a.so:{ours}"):
        assert preload_env(env={"LD_PRELOAD": present})["LD_PRELOAD"] == present


@pytest.mark.preloads
def test_env_names_tag_and_backup():
    added = preload_env("weights", "host", env={})
    assert added["MEMSAVER_TAG"] == "weights" and added["MEMSAVER_BACKUP"] == "host"
    assert preload_env(backup="none", env={"MEMSAVER_TAG": "t"})["MEMSAVER_BACKUP"] == "none"


@pytest.mark.preloads
@pytest.mark.parametrize("backup", get_args(memsaver.Backup))
def test_env_takes_every_backup(backup):
    inherited = {"MEMSAVER_TAG": "t", "MEMSAVER_BACKUP": str(backup)}
    assert preload_env("t", backup, env={})["MEMSAVER_BACKUP"] == str(backup)
    assert "MEMSAVER_BACKUP" not in preload_env(env=inherited)


@pytest.mark.preloads
def test_env_rejects_an_invalid_inherited_backup():
    with pytest.raises(ConfigError, match="MEMSAVER_BACKUP is set, and there is no backup 'tape'"):
        preload_env(env={"MEMSAVER_TAG": "t", "MEMSAVER_BACKUP": "tape"})
    assert "MEMSAVER_BACKUP" not in preload_env(env={"MEMSAVER_BACKUP": "tape"})  # no tag


@pytest.mark.preloads
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_env_turns_expandable_segments_off_for_a_whole_process(name):
    conf = "max_split_size_mb:64,expandable_segments:True,pinned_num_register_threads:8"
    env = {name: conf}
    assert preload_env("t", env=env)[name] == conf.replace("True", "False")
    assert preload_env(env={**env, "MEMSAVER_TAG": "t"})[name] == conf.replace("True", "False")
    assert name not in preload_env(env=env)
    assert name not in preload_env("t", env={name: "expandable_segments:False"})
    assert env == {name: conf}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("",), "cannot be empty"),
        (("a\0b",), "NUL"),
        (("a\x1fhost",), "reserved"),
        (("t", "tape"), "no backup 'tape'; the backups are 'none', 'host', 'pageable', 'disk'"),
        ((None, "host"), "needs a tag"),
    ],
)
def test_env_rejects_bad_input(arguments, says):
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=says):
        preload_env(*arguments, env={})
    with pytest.raises(ConfigError):
        with preload(*arguments):
            pass
    assert dict(os.environ) == before


OPTIONS = {"MEMSAVER_HOST_BYTES": "64GB", "MEMSAVER_POISON": "", "MEMSAVER_PEER": "cuda:1"}


@pytest.mark.parametrize(("variable", "value"), OPTIONS.items())
def test_env_rejects_an_invalid_option(monkeypatch, variable, value):
    with pytest.raises(ConfigError, match=variable):
        preload_env(env={variable: value})
    monkeypatch.setenv(variable, value)
    before = dict(os.environ)
    with pytest.raises(ConfigError, match=variable), preload():
        pass
    assert dict(os.environ) == before


@pytest.mark.preloads
def test_env_leaves_this_processs_options_unchanged():
    before = memsaver.options()
    # A child may see other directories.
    preload_env(env={"MEMSAVER_HOST_BYTES": "1GiB", "MEMSAVER_DISK_DIR": "/nowhere"})
    assert memsaver.options() == before


def test_env_rejects_an_incomplete_or_unrepresentable_installation(tmp_path, monkeypatch):
    module = sys.modules["memsaver._memory.preload"]
    monkeypatch.setattr(module, "__file__", str(tmp_path / "_memory" / "preload.py"))
    with pytest.raises(NotLoadedError, match="reinstall"):
        preload_env(env={})
    folder = tmp_path / "with space"
    folder.mkdir()
    for name in ("libmemsaver.so", "libmemsaver_preload.so"):
        (folder / name).touch()
    monkeypatch.setattr(module, "__file__", str(folder / "_memory" / "preload.py"))
    with pytest.raises(ConfigError, match="space or colon"):
        preload_env(env={})


def spawned():
    return multiprocessing.get_context("spawn").Pool(1)


@pytest.mark.preloads
def test_preload_reaches_spawned_children(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert not is_preloaded()
    with preload("t"), spawned() as pool:
        assert pool.apply(is_preloaded)
        assert pool.apply(os.getenv, ("MEMSAVER_TAG",)) == "t"
    with spawned() as pool:
        assert not pool.apply(is_preloaded)
        assert pool.apply(os.getenv, ("MEMSAVER_TAG",)) is None


@pytest.mark.preloads
def test_preload_nests_and_restores(monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("LD_PRELOAD", "")
    before = dict(os.environ)
    with pytest.raises(KeyError):
        with preload("outer", "host"):
            outer = dict(os.environ)
            with preload("inner"):
                assert os.environ["MEMSAVER_TAG"] == "inner"
                assert os.environ["LD_PRELOAD"].count("libmemsaver_preload.so") == 1
                assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
            assert dict(os.environ) == outer
            raise KeyError
    assert dict(os.environ) == before
