"""The checks that run under the sanitizers, and their outcomes.

In every process of a check, a sanitizer writes reports to files named after the check. A check
passes if its program succeeds and no such file exists.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from repository import IMPORT_PATH, ROOT, TESTS

from sanitizers.builds import Build

LIMIT_SECONDS = 600
THREADS = 6
MEMORY = "128MiB"  # per device: so little that some allocations and resumes fail

# Tests that cover the C ABI: transfers, backing stores, files, hooks, failures.
SUITE = [
    "transition/test_transitions.py",
    "transition/test_transition_reports.py",
    "memory/test_freeing.py",
    "transition/test_concurrent_transitions.py",
    "transition/test_work_in_flight.py",
    "transition/test_unowned_blocks.py",
    "backup/test_backup_views.py",
    "transition/test_callbacks.py",
    "transition/test_swap.py",
    "transition/test_swap_failures.py",
    "backup/test_backup_stores.py",
    "backup/test_damaged_backups.py",
    "backup/test_kept_backups.py",
    "memory/test_regions.py",
    "transition/test_async.py",
    "transition/test_async_progress.py",
    "transition/test_async_callbacks.py",
    "transition/test_swap_calls.py",
    "transition/test_async_processes.py",
    "transition/test_failures.py",
    "transition/test_double_failures.py",
    "memory/test_no_memory.py",
    "transition/test_interrupts.py",
    "transition/test_deferred_signals.py",
    "backup/test_backup_failures.py",
    "inspection/test_timeline.py",
]
# Starts of the names of slow tests of SUITE that are left out: they reach no block and no edge of
# the native code that the other tests do not reach, and take half of the time of all.
LEFT_OUT = [
    "backup/test_backup_stores.py::test_a_backup_uses_the_pages_of_the_saved_blocks",
    "backup/test_backup_views.py::test_a_retained_copy_has_the_contents_of_the_last_pause",
    "backup/test_damaged_backups.py::test_a_corrupted_byte_is_found",
    "backup/test_damaged_backups.py::test_after_damage_and_another_backup_a_disk_pause_saves_everything",
    "backup/test_damaged_backups.py::test_contents_loaded_again_are_saved_again",
    "backup/test_kept_backups.py::test_a_block_larger_than_a_copy_chunk",
    "backup/test_kept_backups.py::test_a_copy_of_several_copy_chunks_fails[host",
    "backup/test_kept_backups.py::test_a_copy_of_several_copy_chunks_fails[pageable",
    "backup/test_kept_backups.py::test_no_stale_fingerprint_after_a_failed_pause",
    "backup/test_kept_backups.py::test_only_changed_pieces_are_copied",
    "memory/test_no_memory.py::test_a_pause_and_a_resume_on_a_full_device",
    "memory/test_no_memory.py::test_host_memory_is_refused",
    "transition/test_double_failures.py::test_a_resume_and_its_undoing[cuMem",
    "transition/test_double_failures.py::test_a_resume_and_its_undoing[cuStreamSynchronize-once",
    "transition/test_double_failures.py::test_pages_that_could_not_be_unpinned[none",
    "transition/test_double_failures.py::test_pages_that_could_not_be_unpinned[pause",
    "transition/test_interrupts.py::test_transitions_interrupted_everywhere[paused-",
    "transition/test_interrupts.py::test_transitions_interrupted_everywhere[swap-",
    "transition/test_interrupts.py::test_transitions_interrupted_everywhere[waiting-",
    "transition/test_swap_failures.py::test_a_swap_of_large_blocks_that_fails_on_its_way[forever-cuMemcpy",
    "transition/test_swap_failures.py::test_a_swap_of_large_blocks_that_fails_on_its_way[once-",
    "transition/test_transitions.py::test_a_tensor_survives",
]
# Scenarios of `make faults` that cover the rollback and the releases after a failure.
FAULTS = ["pause_host", "resume_host", "resume_disk", "swap_host_none", "free", "allocate_huge"]
# These tests compile programs of tests/native with the compiler that CXX names.
UNITS = ["leaf_units", "backup/test_fingerprint.py::test_the_unit"]

OPTIONS = {
    "ASAN_OPTIONS": "halt_on_error=1:detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1:history_size=4",
}


@dataclass
class Outcome:
    """The outcome of one check."""

    name: str
    passed: int
    failed: int
    text: str  # shown if the check failed
    figures: dict[str, int] = field(default_factory=dict)


@dataclass
class Place:
    """The folder in which checks run and that contains reports and backup files."""

    folder: Path

    def environment(self, name: str, **more: str) -> dict[str, str]:
        (self.folder / "disk").mkdir(exist_ok=True)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
        for variable, options in OPTIONS.items():
            extra = more.pop(variable, "")
            kept[variable] = f"{options}:{extra}:log_path={self.folder / name}.report"
        return {**kept, **more}

    def reports(self, name: str) -> str:
        found = sorted(self.folder.glob(f"{name}.report*"))
        return "\n".join(path.read_text(errors="replace")[:6000] for path in found)


def run(command: list[str], env: dict[str, str], cwd: Path) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command, env=env, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"")[-3000:].decode(errors="replace")
        return 1, f"not done in {LIMIT_SECONDS} s\n{said}"
    return done.returncode, done.stdout + done.stderr


def stress(place: Place, built: Build, seed: int, operations: int, leaks: bool) -> Outcome:
    """Run the stress test, whose concurrent threads check every byte of their memory."""
    name = f"{built.variant.name}-stress-{seed}"
    env = place.environment(
        name,
        ASAN_OPTIONS=f"detect_leaks={int(leaks)}",
        MEMSAVER_DRIVER="sim",
        MEMSAVER_SIM_DEVICES="2",
        MEMSAVER_SIM_MEMORY=MEMORY,
        MEMSAVER_DISK_DIR=str(place.folder / "disk"),
        XDG_RUNTIME_DIR=str(place.folder),
    )
    command = [str(built.stress()), str(seed), str(operations), str(THREADS)]
    status, said = run(command, env, place.folder)
    reports = place.reports(name)
    done = re.match(r"(\d+) operations", said)
    fine = status == 0 and not reports and done is not None
    figures = {"operations": int(done[1]) if done else 0}
    return Outcome(name, int(fine), int(not fine), f"{said}\n{reports}", figures)


def leaks_are_found(place: Place, built: Build) -> bool:
    """Return whether the leak sanitizer works here; the sanitizer requires ptrace, which a
    container can deny.
    """
    outcome = stress(place, built, 0, 0, leaks=True)
    return "LeakSanitizer has encountered a fatal error" not in outcome.text


def of_python(place: Place, built: Build, name: str) -> dict[str, str]:
    """Return the environment of a check whose Python programs use the sanitized libraries."""
    return place.environment(
        name,
        ASAN_OPTIONS="detect_leaks=0",  # the interpreter itself leaks
        LD_PRELOAD=built.runtimes(),
    )


def faults(place: Place, built: Build) -> Outcome:
    """Run some scenarios of the fault sweep with the sanitized libraries."""
    env = {**of_python(place, built, "faults"), "PYTHONPATH": IMPORT_PATH}
    only = [word for scenario in FAULTS for word in ("--only", scenario)]
    command = [sys.executable, "-m", "faults", "--every", "1000", "--package", str(built.site())]
    status, said = run([*command, *only], env, ROOT)
    reports = place.reports("faults")
    counts = re.search(r"(\d+) passed, (\d+) failed", said)
    passed, failed = map(int, counts.groups()) if counts else (0, 1)
    if status != 0 or reports:
        failed = max(failed, 1)
    return Outcome("faults", passed, failed, f"{said[-6000:]}\n{reports}", {"faults": passed})


def suite(place: Place, built: Build) -> Outcome:
    """Run tests of the Python package with the sanitized libraries."""
    for name in LEFT_OUT:
        file, _, test = name.partition("::")
        if f"def {test.partition('[')[0]}(" not in (TESTS / file).read_text():
            return Outcome("suite", 0, 1, f"LEFT_OUT names a test that does not exist: {name}")
    env = of_python(place, built, "suite")
    # Tests wait for a third of their time, and those of one file take as long as a third of all.
    options = ["-n", "3", "--dist", "worksteal"]
    options += [f"--deselect=tests/{name}" for name in LEFT_OUT]
    return pytest_run(place, "suite", SUITE, env, built.site(), *options)


def units(place: Place, built: Build) -> Outcome:
    """Run the native test programs, which are sanitized. Python only starts them."""
    name = f"{built.variant.name}-units"
    env = place.environment(name, CXX=built.compiler)
    return pytest_run(place, name, UNITS, env, ROOT)


def pytest_run(
    place: Place, name: str, tests: list[str], env: dict[str, str], cwd: Path, *options: str
) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += ["--timeout", "300", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += [*options, *(str(TESTS / test) for test in tests)]
    status, said = run(command, env, cwd)
    reports = place.reports(name)
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", said)}
    passed = counts.get("passed", 0)
    failed = counts.get("failed", 0) + counts.get("error", 0)
    if not failed and (status != 0 or reports or not passed):
        failed = 1
    return Outcome(name, passed, failed, f"{said[-6000:]}\n{reports}", {"tests": passed})
