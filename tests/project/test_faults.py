"""Tests parts of the fault sweep (`make faults`), and that the sweep detects violations."""

import os
import subprocess
import sys

import pytest
from faults.injections import Injection, injections_of
from faults.lanes import Workplace
from repository import IMPORT_PATH, TESTS

# Parts of the sweep, by the bug that each once found.
PARTS = {
    "a free without memory, a capture broken": [
        "free:malloc",
        "allocate_in_capture:cuThreadExchangeStreamCaptureMode",
    ],
    "a pause that was done and failed without memory": ["pause_none:malloc"],
    "a disk that was full because it could not be asked": ["pause_disk_cached:statvfs"],
    "a device that was retained without memory": ["first_device:malloc"],
    "memory of a killed exporter that stayed mapped": ["release_of_killed:cuMemUnmap"],
}


def sweep(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "faults", *arguments],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.long
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_part_of_the_sweep(parts):
    status, said = sweep(*(word for part in parts for word in ("--only", part)))
    assert status == 0, said
    assert said.splitlines()[-1].endswith(" passed, 0 failed"), said
    assert int(said.splitlines()[-1].split()[0]) >= 3, said


def test_a_violation_is_a_failure_that_can_be_repeated_alone():
    # The library believes a driver that reports its end, and drops its memory: a leak in this case.
    fault = "pause_none:cuMemRelease:1:4:once"
    status, said = sweep("--only", fault)
    assert status == 1
    assert said.splitlines()[-1] == "0 passed, 1 failed"
    assert f'make faults ARGS="--only {fault}"' in said


def test_a_fault_that_meets_no_call_counts_for_nothing():
    status, said = sweep("--only", "stats:cuMemCreate:1:2:once")
    assert status == 1, said
    assert said.splitlines()[-1] == "0 passed, 0 failed"


@pytest.mark.parametrize("only", ["pause_none:cuMemCreate", "a:b:c:d:once"])
def test_nothing_to_inject_is_an_error(only):
    status, said = sweep("--only", only)
    assert status == 1
    assert "passed" not in said


def test_an_injection_is_parsed_from_its_text():
    made = list(injections_of("pause", {"cuMemMap": 2, "pread": 1}))
    assert len({str(injection) for injection in made}) == len(made)
    assert all(Injection.parse(str(injection)) == injection for injection in made)
    assert {injection.nth for injection in made if injection.call == "cuMemMap"} == {1, 2}
    assert {injection.forever for injection in made} == {True, False}
    with pytest.raises(ValueError, match="once"):
        Injection.parse("pause:cuMemMap:1:2:often")


def test_an_error_without_memory_for_its_message_has_one(tmp_path, run_python):
    """A driver call fails, and the allocation of memory for the error message also fails."""
    place = Workplace(tmp_path)
    done = run_python(
        """
        import ctypes
        import memsaver
        from memsaver import simulator
        from simulated_driver import Simulator

        sim, system = Simulator(), ctypes.CDLL(None)
        with memsaver.region("a"):
            block = simulator.buffer(4096)
        assert system.os_faults_watch(b"/libmemsaver.so") == 0
        system.os_faults_set.argtypes = [
            *(ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_uint64)
        ]
        said = set()
        for nth in range(1, 200):
            system.os_faults_set(b"malloc", nth, 12, 1)
            with sim.fault("cuMemFree", times=0):
                try:
                    memsaver.pause("a")
                except memsaver.MemsaverError as error:
                    met = system.os_faults_clear()
                    assert str(error), repr(error)
                    if isinstance(error, memsaver.DriverError):
                        assert "cuMemFree" in str(error) and error.call == "cuMemFree"
                    said.add(str(error))
            if not met:
                break
        print(len(said))
        """,
        **{k: place.environment[k] for k in ("LD_PRELOAD", "MEMSAVER_TEST_SYSTEM_ROOT")},
    )
    assert int(done.stdout) >= 3, done.stdout


def test_a_swap_that_cannot_be_undone_reports_so_even_without_host_memory(tmp_path, run_python):
    """A host allocation fails, and the driver calls of the rollback also fail."""
    place = Workplace(tmp_path)
    done = run_python(
        """
        import memsaver
        from memsaver import simulator
        from simulated_driver import Simulator
        from model.calls import System

        MIB = 1 << 20
        sim = Simulator()
        system = System(sim)
        memsaver.configure(share_bytes="2MiB", slab_bytes="2MiB")
        with memsaver.region("into", backup="host"):
            coming = [simulator.buffer(2 * MIB) for _ in range(4)]
        memsaver.pause("into")
        with memsaver.region("out", backup="host"):
            going = [simulator.buffer(2 * MIB) for _ in range(4)]
        for index, block in enumerate(going):
            sim.write(block.address, bytes([index + 1]) * 512)
        kept, parked, drivers = 0, 0, 0
        for nth in range(60, 260):  # before that it is still being planned
            memsaver.resume("out", "into")
            memsaver.pause("into")
            sim.fail("cuMemMap", 1, nth=2, times=0)
            system.os.os_faults_set(b"malloc", nth, 12, 1)
            try:
                memsaver.swap(out="out", into="into")
            except memsaver.MemsaverError as error:
                met = system.os.os_faults_clear()
                said, state = str(error), memsaver.state("out")
                kept += state == "mapped"
                if state == "paused":
                    parked += 1
                    assert "resume them" in said, said
                if isinstance(error, memsaver.DriverError):
                    drivers += 1
                    assert "cuMemMap" in said, said
            system.clear()
            memsaver.resume("out")
            for index, block in enumerate(going):
                assert sim.read(block.address, 512) == bytes([index + 1]) * 512
            if not met:  # the swap makes fewer allocations
                break
        print(kept > 0, parked > 0, drivers > 0)
        """,
        PYTHONPATH=IMPORT_PATH,
        **{k: place.environment[k] for k in ("LD_PRELOAD", "MEMSAVER_TEST_SYSTEM_ROOT")},
    )
    assert done.stdout == "True True True\n", done.stdout


@pytest.mark.parametrize("backup", ["host", "pageable", "disk", "peer"])
def test_a_swap_is_undone_without_host_memory(tmp_path, run_python, backup):
    """The nth allocation and all later allocations fail, both in the swap and in its rollback."""
    place = Workplace(tmp_path)
    done = run_python(
        f"""
        import errno
        import memsaver
        from faults.injections import Injection
        from model.calls import System
        from simulated_driver import Block, Simulator

        MIB = 1 << 20
        system = System(Simulator())
        system.sim.start(0), system.sim.start(1)
        memsaver.configure(share_bytes="4MiB", slab_bytes="2MiB")
        with memsaver.region("into", backup="host"):
            into = [Block(system.sim, size * MIB, 1) for size in (4, 2)]
        memsaver.pause("into")
        with memsaver.region("out", backup={backup!r}):
            out = [Block(system.sim, size * MIB - 5000, 2) for size in (2, 4, 2)]
        undone, nth = 0, 0
        while memsaver.state("out") == "mapped":
            nth += 1
            system.arm(Injection("swap", "malloc", nth, errno.ENOMEM, forever=True))
            try:
                memsaver.swap(out="out", into="into")
            except memsaver.OutOfHostMemoryError as error:
                system.clear()
                undone += 1
                assert memsaver.state("out") == "mapped", (nth, str(error))
                assert memsaver.state("into") == "paused", (nth, str(error))
                assert all(block.is_intact() for block in out), nth
            system.clear()
        memsaver.resume()
        assert all(block.is_intact() for block in out + into) and not system.sim.violations()
        print(undone)
        """,
        MEMSAVER_SIM_DEVICES=2,
        MEMSAVER_DISK_DIR=place.environment["MEMSAVER_DISK_DIR"],
        **{k: place.environment[k] for k in ("LD_PRELOAD", "MEMSAVER_TEST_SYSTEM_ROOT")},
    )
    assert int(done.stdout) > 100, done.stdout
