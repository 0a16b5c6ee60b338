"""Judges mutants: measures once which tests run which code, and runs a mutant's tests on the
mutant.
"""

from __future__ import annotations

import re
import signal
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation.mutants import Mutant, function_at
from mutation.places import Ended, Place

# Tests of the repository itself, and test programs, which take long or need other machines.
LEFT_OUT = ("project", "gpu", "recipes", "soak", "fuzz", "faults", "model", "walks", "sanitizers")
SECONDS_OF_A_FILE = 400  # a test file that takes longer when it is measured is not used
CALL = re.compile(
    r"/(?P<file>(?:memsaver|integrations(?!/torch_)|torch_memory_saver(?!/torch_))/[^:]*\.py)"
    r":(?P<function>.*)$"
)
KILLED = ("failed", "hung")
REFUSED = (
    "not built",
    "same code",
    "interrupted",
)  # such a mutant is not judged, and replaced by another


@dataclass(frozen=True)
class TestFile:
    """A test file and its measurements without mutants.

    `calls` contains the functions that the test file calls, by source file.
    """

    __test__ = False
    path: str
    seconds: float  # of CPU time
    failed: list[str] = field(default_factory=list)
    calls: dict[str, list[str]] = field(default_factory=dict)
    usable: bool = True


@dataclass(frozen=True)
class Limits:
    """The time limits, in seconds, for a test and for all tests of a mutant, measured without
    the mutant.
    """

    one_test: float = 60
    all_tests: float = 150
    far_tests: float = 30  # those of all_tests that only import the module of a mutant


def test_files(tree: Path) -> list[str]:
    """Return the test files that can judge mutants."""
    found = [str(path.relative_to(tree)) for path in sorted(tree.glob("tests/**/test_*.py"))]
    return [path for path in found if Path(path).parts[1] not in LEFT_OUT]


def _pytest(
    place: Place, limits: Limits, tests: list[str], seconds: float, **variables: str
) -> Ended:
    command = [str(place.python), "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "-m", "not soak and not long"]
    command += [f"--timeout={limits.one_test}", "--timeout-method=thread", *tests]
    return place.run(command, seconds, **variables)


def _failures(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def measure(place: Place, test: str, limits: Limits) -> TestFile:
    """Run a test file without mutants; measure its failures, duration and calls."""
    record = place.folder / "calls"
    record.write_text("")
    ended = _pytest(place, limits, [test], SECONDS_OF_A_FILE, MUTATION_CALLS=str(record))
    failed = _failures(ended.output)
    whole = test in failed or ended.status not in (0, 1)  # it cannot be collected, or ended early
    calls: dict[str, list[str]] = {}
    for line in sorted(set(record.read_text(errors="replace").splitlines())):
        match = CALL.search(line)
        if match:
            # Copies that tests install lie in other folders than the sources.
            file = match["file"].replace("memsaver/integrations/", "integrations/")
            if file.startswith("torch_memory_saver/"):
                file = f"integrations/torch_memory_saver/{file}"
            calls.setdefault(file, []).append(match["function"])
    return TestFile(test, ended.cpu_seconds, failed, calls, usable=not whole)


class Judge:
    """Chooses and runs the tests of each mutant, and records which tests fail most often.

    Thread-safe.
    """

    def __init__(self, tests: list[TestFile], limits: Limits) -> None:
        self.tests = {test.path: test for test in tests if test.usable}
        self.limits = limits
        self._lock = threading.Lock()
        self._kills: Counter[str] = Counter()
        self._unchanged: dict[Path, bytes] = {}

    def learn(self, test: str) -> None:
        """Count a mutant that a test file detected, in this run or an earlier run."""
        with self._lock:
            self._kills[test] += 1

    def chosen(self, mutant: Mutant, text: str) -> list[TestFile]:
        """Return the test files that can detect a mutant, the most promising file first."""
        if mutant.file.endswith(".py"):
            function = function_at(text, mutant.line)
            known = [t for t in self.tests.values() if mutant.file in t.calls]
            near = {t.path for t in known if function in t.calls[mutant.file]}
        else:
            # Nearly all tests run most of the core: those whose names share a word come first.
            words = set(Path(mutant.file).stem.split("_"))
            near = {p for p in self.tests if words & set(re.split(r"[/_.]", p))}
            known = list(self.tests.values())
        known = known or list(self.tests.values())
        with self._lock:
            rates = {t.path: (self._kills[t.path] + 0.5) / (t.seconds + 1) for t in known}
        known.sort(key=lambda t: (t.path not in near, -rates[t.path], t.path))
        far = self.limits.all_tests
        if mutant.file.endswith(".py"):
            far = self.limits.far_tests
        chosen: list[TestFile] = []
        left, left_far = self.limits.all_tests, far
        for test in known:
            is_near = test.path in near
            if not chosen or test.seconds <= (left if is_near else min(left, left_far)):
                chosen.append(test)
                left -= test.seconds
                left_far -= 0 if is_near else test.seconds
        return chosen

    def judge(self, place: Place, mutant: Mutant) -> dict[str, Any]:
        """Return the result, the test file that caused the result, and the CPU time in seconds."""
        text = (place.tree / mutant.file).read_text()
        native = not mutant.file.endswith(".py")
        spent = 0.0
        if native:
            self._prepare(place)
        place.write(mutant.file, mutant.applied(text))
        try:
            if native:
                built = place.build()
                spent += built.cpu_seconds
                if built.status != 0:
                    return {"result": "not built", "seconds": spent}
                if place.built_core() == self._unchanged[place.folder]:
                    return {"result": "same code", "seconds": spent}
            result = self._run(place, self.chosen(mutant, text))
        finally:
            place.write(mutant.file, text)
        if "by" in result:
            self.learn(result["by"])
        return {**result, "seconds": spent + result["seconds"]}

    def _prepare(self, place: Place) -> None:
        """Build and store the unchanged core, to detect mutants that do not change the compiled
        core.
        """
        if place.folder in self._unchanged:
            return
        ended = place.build()
        if ended.status != 0:
            raise RuntimeError(f"the unchanged core could not be built: {ended.output[-2000:]}")
        self._unchanged[place.folder] = place.built_core()

    def _run(self, place: Place, tests: list[TestFile]) -> dict[str, Any]:
        spent, flaky = 0.0, 0
        while tests:
            arguments = ["-x", *(f"--deselect={name}" for t in tests for name in t.failed)]
            expected = sum(test.seconds for test in tests)
            seconds = 6 * expected + 2 * self.limits.one_test
            ended = _pytest(place, self.limits, [*arguments, *(t.path for t in tests)], seconds)
            spent += ended.cpu_seconds
            if ended.status in (0, 5):  # 5: no test was selected
                break
            if ended.status == -signal.SIGKILL:  # not by a test; for example, at the end of the run
                return {"result": "interrupted", "seconds": spent}
            failed = _failures(ended.output)
            last = failed[0].partition("::")[0] if failed else tests[0].path
            if ended.status is None or "+ Timeout +" in ended.output:
                return {"result": "hung", "by": last, "seconds": spent}
            repeated = failed[:1] or [*arguments, *(t.path for t in tests)]  # none: it crashed
            again = _pytest(place, self.limits, repeated, seconds)
            spent += again.cpu_seconds
            if again.status != 0:
                return {"result": "failed", "by": last, "test": failed[:1], "seconds": spent}
            flaky += 1  # a failure that is not repeated does not detect the mutant
            tests = tests[[t.path for t in tests].index(last) + 1 :] if failed else []
        return {"result": "survived", "flaky": flaky, "seconds": spent}
