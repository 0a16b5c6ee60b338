"""Tests performance warnings: each warning is issued once per tag, and only if a cost exists."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest

import memsaver
from memsaver._memory import costs, torch_mode
from memsaver._runtime.native import _C, note

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(costs, "LARGE_BYTES", 4 * MIB)
    monkeypatch.setattr(costs, "_reported", set())


@pytest.fixture
def name(tag):
    return tag("weights")


def warned(call, *args, **kwargs) -> list[str]:
    """Return the messages of the warnings that a call issues."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(*args, **kwargs)
        if isinstance(result, memsaver.Transition):
            result.wait()
    for warning in caught:
        assert issubclass(warning.category, memsaver.PerformanceWarning), warning.message
        assert warning.filename == __file__
    return [str(warning.message) for warning in caught]


# --- unowned blocks -------------------------------------------------------------------------------


class Pools:
    """A fake of torch's pools that lists the blocks that no tensor owns."""

    def __init__(self) -> None:
        self.unowned: list[tuple[int, int]] = []

    def unowned_ranges(self) -> list[tuple[int, int]]:
        return self.unowned

    def is_capturing(self) -> bool:
        return False


@pytest.fixture
def pools(monkeypatch):
    made = Pools()
    for module in (memsaver._transitions.transitions, memsaver._transitions.handles):
        monkeypatch.setattr(module, "torch_pools", lambda required=True: made)
    return made


@pytest.mark.parametrize("wait", [True, False])
def test_a_tag_mostly_of_unowned_blocks(sim, name, make_blocks, pools, wait):
    blocks = make_blocks(name, [2 * MIB, 12 * MIB], backup="host")
    pools.unowned = [(blocks[1].address, 8 * MIB), (blocks[1].address + 8 * MIB, 4 * MIB)]
    (text,) = warned(memsaver.pause, name, wait=wait)
    assert "14 MiB" in text and "12 MiB are blocks that no tensor owns" in text
    assert repr(name) in text and "empty_cache()" in text
    memsaver.resume(name)
    assert warned(memsaver.pause, name) == []  # warns only once
    memsaver.resume(name)
    assert blocks[0].is_intact()


def test_unowned_blocks_that_are_few_small_or_anothers(sim, tag, make_blocks, pools):
    large, small, other = tag("large"), tag("small"), tag("other")
    blocks = make_blocks(large, [16 * MIB], backup="host")
    few = make_blocks(small, [4 * MIB], backup="host")
    others = make_blocks(other, [16 * MIB], backup="host")
    pools.unowned = [(blocks[0].address, 7 * MIB)]  # less than half of the tag
    assert warned(memsaver.pause, large) == []
    memsaver.resume(large)
    pools.unowned = [(others[0].address, 12 * MIB)]
    assert warned(memsaver.pause, large) == []
    memsaver.resume(large)
    (text,) = warned(memsaver.pause, other)
    assert repr(other) in text
    pools.unowned = [(few[0].address, 3 * MIB)]  # less than LARGE_BYTES
    assert warned(memsaver.pause, small) == []
    memsaver.resume(small, other)


def test_nothing_is_checked_without_a_backup(sim, name, make_blocks, monkeypatch):
    def none(*_):
        raise AssertionError

    monkeypatch.setattr(torch_mode.TorchPools, "unowned_ranges", none)
    blocks = make_blocks(name, [8 * MIB])
    assert warned(memsaver.pause, name) == []
    memsaver.resume(name)
    assert blocks[0].is_zero()


# --- pageable memory ------------------------------------------------------------------------------


def test_pageable_on_a_machine_with_memory_to_spare(sim, name, make_blocks):
    blocks = make_blocks(name, [8 * MIB], backup="pageable")
    (text,) = warned(memsaver.pause, name)
    assert repr(name) in text and "8 MiB" in text and "backup='host'" in text
    memsaver.resume(name)
    assert warned(memsaver.pause, name) == []
    memsaver.resume(name)
    assert blocks[0].is_intact()


def test_pageable_chosen_for_one_call(sim, name, make_blocks):
    blocks = make_blocks(name, [8 * MIB], backup="host")
    assert warned(memsaver.pause, name) == []
    memsaver.resume(name)
    blocks[0].fill(7)
    assert len(warned(memsaver.pause, name, backup="pageable")) == 1
    memsaver.resume(name)
    assert blocks[0].is_intact()


@pytest.mark.parametrize("backup", ["none", "host", "disk"])
def test_other_backups_are_not_pageable(sim, name, make_blocks, backup):
    blocks = make_blocks(name, [8 * MIB], backup=backup)
    assert warned(memsaver.pause, name) == []
    memsaver.resume(name)
    del blocks


def test_pageable_without_memory_to_spare(sim, name, make_blocks, options):
    options(host_bytes=_C.host_memory()[0] + 56 * MIB)  # 16 MiB of these are for staging
    blocks = make_blocks(name, [32 * MIB], backup="pageable")
    assert warned(memsaver.pause, name) == []
    memsaver.resume(name)
    del blocks


# --- unused backups -------------------------------------------------------------------------------


def cycle(name: str, blocks: list) -> list[str]:
    """Pause, delete the tensors, and resume."""
    said = warned(memsaver.pause, name)
    blocks.clear()
    return said + warned(memsaver.resume, name)


def test_backups_of_tensors_deleted_while_paused(sim, name, make_blocks):
    kept = make_blocks(name, [2 * MIB], backup="host")
    assert cycle(name, make_blocks(name, [8 * MIB])) == []  # may happen once by chance
    (text,) = cycle(name, make_blocks(name, [8 * MIB]))
    assert "10 MiB" in text and "8 MiB of it are not restored" in text
    assert cycle(name, make_blocks(name, [8 * MIB])) == []
    assert kept[0].is_intact()


def test_backups_that_are_read_for_the_most_part(sim, name, make_blocks):
    kept = make_blocks(name, [12 * MIB], backup="host")
    for _ in range(3):
        assert cycle(name, make_blocks(name, [4 * MIB])) == []
    assert kept[0].is_intact()


PROGRAM = """
import sys
import memsaver
from memsaver import simulator
from memsaver._memory import costs
costs.LARGE_BYTES = 1 << 20

with memsaver.region("weights", backup="host"):
    block = simulator.empty(1 << 19) if "viewed" in sys.argv else simulator.buffer(2 << 20)
if "before" in sys.argv:
    memsaver.pause("weights")
    memsaver.resume("weights")
if "silent" in sys.argv:
    import warnings
    warnings.simplefilter("ignore", memsaver.PerformanceWarning)
if "none" in sys.argv:
    memsaver.pause("weights", backup="none")
else:
    memsaver.pause("weights")
if "resumed" in sys.argv:
    memsaver.resume("weights")
if "viewed" in sys.argv:
    memsaver.backup_view(block)
if "failed" in sys.argv:
    raise KeyError("of the program")
"""


def run_program(*words: str) -> str:
    """Run PROGRAM and return its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == ("failed" in words) and done.stdout == "", done.stderr
    return done.stderr


def test_a_process_that_ends_without_any_resume():
    said = run_program()
    assert "PerformanceWarning: tag 'weights' was paused with a backup of 2 MiB" in said
    assert said.count("PerformanceWarning") == 1 and "Traceback" not in said
    for words in ("before",), ("silent",), ("none",), ("resumed",):
        assert run_program(*words) == "", words
    assert "PerformanceWarning" not in run_program("failed")


def test_a_process_that_ends_after_a_look_at_the_backup(run_python):
    pytest.importorskip("torch")
    program = PROGRAM.replace("sys.argv", "('viewed',)")
    assert run_python(program, with_torch=True).stderr == ""


# --- warnings and failing checks do not affect transitions ----------------------------------------


def test_as_errors_they_come_after_the_pause(sim, name, make_blocks):
    blocks = make_blocks(name, [8 * MIB], backup="pageable")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(memsaver.PerformanceWarning):
            memsaver.pause(name)
    assert memsaver.state(name) == "paused"
    memsaver.resume(name)
    assert blocks[0].is_intact()


def test_warnings_raised_as_errors_replace_no_other_error(sim, name, make_blocks):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError), memsaver.region(name):
            note("a warning", memsaver.UsageWarning)
            raise ZeroDivisionError
        note("a warning", memsaver.UsageWarning)
        with pytest.raises(memsaver.UnknownTagError):
            memsaver.trim(wait=True, tags="unknown")


def test_a_check_that_fails_is_no_failure(sim, name, make_blocks, monkeypatch):
    def broken(*_):
        raise RuntimeError

    blocks = make_blocks(name, [8 * MIB], backup="pageable")
    monkeypatch.setattr(costs, "tag_totals", broken)
    assert warned(memsaver.pause, name) == []
    assert warned(memsaver.resume, name) == []
    assert blocks[0].is_intact()
