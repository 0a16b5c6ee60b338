"""Runs the soak test of gpu/test_soak.py for a few seconds, on simulated devices."""

import json

import pytest
import reliability
from soak import race


@pytest.fixture(scope="module")
def found():
    return race.run("sim", seconds=50, steps=120, seed=1, patience=60)


def test_a_short_soak(found):
    race.check(found)
    assert found["cycles"] > 20
    assert found["fingerprinted_bytes"] > found["copied_bytes"] > 0


def test_it_meets_shortages_and_faults(found):
    met = found["errors_met"]
    assert met["OutOfDeviceMemoryError"] > 0
    assert met["DriverError"] > 0


def test_every_kind_of_step_was_made(found):
    steps = {"create", "delete", "pause", "resume", "swap", "pause_for_a_block", "take", "trim"}
    assert steps <= {name for name, count in found["operations"].items() if count > 0}


def test_violations_are_detected(run_python):
    """The soak test detects changed contents, a tag's wrong state, and memory that is not freed."""
    run_python("""
        from pathlib import Path
        import memsaver
        from memsaver import simulator
        from soak.memory import SimulatedMemory
        from soak.model import Digests, Piece, SoakedTag, Wrong, ZERO
        from soak.turnstile import Turnstile
        from soak.walk import Walk

        def wrong(call, *arguments):
            try:
                call(*arguments)
            except Wrong as error:
                return str(error)
            raise AssertionError("it was not found")

        memory = SimulatedMemory(1, None)
        tag = SoakedTag("t", "host", 1 << 20)
        with memsaver.region("t", backup="host"):
            tag.pieces = [Piece(memory, Digests(memory), 5000)]
        tag.check_mapped()
        memory._sim.write(tag.pieces[0].address + 4999, b"?")
        assert "not what they were" in wrong(tag.check_mapped)
        tag.pieces[0].fill()
        tag.was_paused("none")
        assert "not what they were" in wrong(tag.check_mapped)  # it should be zero
        memory.zero(tag.pieces[0].tensor)
        tag.check_mapped()
        memsaver.pause("t")
        assert "should be mapped" in wrong(tag.check_mapped)
        memsaver.resume("t")
        walk = Walk(memory, 1, Turnstile(Path(".")))
        assert "memory is held" in wrong(walk.finish)
        tag.pieces.clear()
        walk.finish()
    """)


def test_leftover_resources_are_reported():
    start, end = {"handles": 3, "free_bytes": 10}, {"handles": 4, "free_bytes": 9}
    found = {"driver": "sim", "start": [start, start], "end": [start, end]}
    assert race.left(found) == [
        "process 1: handles 3 -> 4",
        "process 1: free_bytes 10 -> 9",
    ]
    assert race.left({**found, "end": [start, start]}) == []


def test_a_process_that_ends_is_reported(tmp_path):
    walker = race.Walker(["false"], {}, tmp_path / "errors")
    with pytest.raises(race.Failed, match="status 1"):
        walker.answer(30)


def test_figures_are_added_to_a_file(tmp_path):
    path = tmp_path / "build" / "reliability.json"
    reliability.record("faults", {"n": 1}, path)
    reliability.record("soak", {"n": 2}, path)
    reliability.record("soak", {"n": 3}, path)
    held = json.loads(path.read_text())
    assert {key: row["n"] for key, row in held.items()} == {"faults": 1, "soak": 3}
    assert all(row["commit"] and row["date"] and row["machine"] for row in held.values())
