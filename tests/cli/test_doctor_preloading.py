"""Tests `memsaver doctor`'s findings about preloaded libraries and the process's own tag."""

import json
from pathlib import Path

import pytest
from doctors import of, run_doctor

from memsaver._runtime.native import LIBRARY_DIR
from memsaver.cli.checks import preloading

OURS = str(LIBRARY_DIR / "libmemsaver_preload.so")


@pytest.fixture
def libraries(tmp_path):
    """Create fake libraries, some from another installation, with and without a core."""
    for folder in ("whole", "half"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "libmemsaver_preload.so").touch()
    (tmp_path / "whole" / "libmemsaver.so").touch()
    (tmp_path / "torch_memory_saver_hook_mode_preload_cu12.abi3.so").touch()
    (tmp_path / "libjemalloc.so.2").touch()
    return tmp_path


@pytest.mark.preloads
def test_the_order_of_preloaded_libraries(plain, libraries):
    allocator = libraries / "libjemalloc.so.2"
    plain.setenv("LD_PRELOAD", f"{allocator}:{OURS} libasan.so")
    found = preloading.check_preloading()
    assert [finding.name for finding in found] == ["preloaded"] and found[0].level == "good"
    rows = [(row["path"], row["kind"]) for row in found[0].data["libraries"]]
    assert rows == [(str(allocator), "other"), (OURS, "memsaver"), ("libasan.so", "other")]
    text = found[0].text
    assert text.index("jemalloc") < text.index("(memsaver)") < text.index("libasan")


def test_nothing_is_preloaded(plain):
    (found,) = preloading.check_preloading()
    assert (found.level, found.text, found.data) == ("absent", "nothing", {"libraries": []})


@pytest.mark.preloads
def test_libraries_that_the_system_preloads_come_last(system, libraries):
    system({"/etc/ld.so.preload": "/lib/first.so\n"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", OURS)
        found = preloading.check_preloading()
    paths = [row["path"] for row in of(found, "preloaded").data["libraries"]]
    assert paths == [OURS, "/lib/first.so"]


@pytest.mark.preloads
def test_two_savers_in_one_process(plain, libraries):
    theirs = libraries / "torch_memory_saver_hook_mode_preload_cu12.abi3.so"
    plain.setenv("LD_PRELOAD", f"{theirs}:{OURS}")
    plain.setattr(preloading, "installed_version", lambda name: "0.0.10")
    found = preloading.check_preloading()
    assert of(found, "preloaded").level == "bad" and "only the first takes effect" in found[0].text
    assert of(found, f"preloaded {theirs.name}").level == "warned"
    plain.setattr(preloading, "installed_version", lambda name: "0.0.10+memsaver")
    assert [finding.level for finding in preloading.check_preloading()] == ["good"]


@pytest.mark.parametrize(
    ("entry", "level", "says"),
    [
        ("whole/libmemsaver_preload.so", "bad", "another installation's"),
        ("no/such.so", "warned", "does not exist"),
    ],
)
def test_an_entry_that_is_wrong(plain, libraries, entry, level, says):
    plain.setenv("LD_PRELOAD", str(libraries / entry))
    found = of(preloading.check_preloading(), f"preloaded {Path(entry).name}")
    assert found.level == level and says in found.text and found.advice


def test_hooks_without_their_core_are_bad(plain, libraries):
    plain.setattr(preloading, "LIBRARY_DIR", libraries / "half")
    plain.setenv("LD_PRELOAD", str(libraries / "half" / "libmemsaver_preload.so"))
    found = of(preloading.check_preloading(), "preloaded libmemsaver_preload.so")
    assert found.level == "bad" and "libmemsaver.so is missing" in found.text


@pytest.mark.preloads
@pytest.mark.parametrize(
    ("env", "is_loaded", "level", "says"),
    [
        ({"MEMSAVER_TAG": "trainer"}, False, "warned", "memsaver is not preloaded"),
        ({"MEMSAVER_TAG": "trainer", "LD_PRELOAD": OURS}, True, "good", "backup none"),
        ({"MEMSAVER_TAG": "trainer", "LD_PRELOAD": OURS}, False, "bad", "did not find the library"),
        ({"MEMSAVER_BACKUP": "host"}, True, "warned", "without MEMSAVER_TAG"),
        ({"MEMSAVER_TAG": "t", "MEMSAVER_BACKUP": "tape"}, True, "bad", "tape"),
    ],
)
def test_the_processs_own_tag_is_judged(plain, env, is_loaded, level, says):
    plain.setattr(preloading, "is_preloaded", lambda: is_loaded)
    for name, value in env.items():
        plain.setenv(name, value)
    found = of(preloading.check_preloading(), "process tag")
    assert found.level == level and says in found.text


@pytest.mark.preloads
def test_a_preloaded_process_is_reported():
    done = run_doctor("--json", LD_PRELOAD=OURS, MEMSAVER_TAG="all", MEMSAVER_BACKUP="host")
    rows = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    assert rows["process tag"]["data"] == {"tag": "all", "backup": "host"}
    assert rows["preloaded"]["data"]["libraries"] == [{"path": OURS, "kind": "memsaver"}]
