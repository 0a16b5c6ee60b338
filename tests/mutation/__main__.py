"""`make mutation`: changes lines of code at random and counts the changes that the tests detect.

The program measures once which tests run which functions, then judges mutants until each group has
`--count` of them. A mutant is detected if a test fails twice or hangs. A mutant that does not
compile, or that does not change the compiled core, is replaced by the next mutant. Results are
appended to files in `--out`, so an interrupted run continues at the point of interruption.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from repository import ROOT

from mutation.judging import KILLED, REFUSED, Judge, Limits, TestFile, measure, test_files
from mutation.mutants import GROUPS, Mutant, draw
from mutation.places import Place


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutation", description=__doc__)
    parser.add_argument(
        "--ref", default="HEAD", help="a commit, or the path of a tar file with a source tree"
    )
    parser.add_argument(
        "--group", action="append", choices=GROUPS, help="the group to judge (default: all groups)"
    )
    parser.add_argument(
        "--count", type=int, default=400, metavar="N", help="number of mutants in a group"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--workers", type=int, default=2, metavar="N")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="S")
    parser.add_argument("--nice", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutation", metavar="FOLDER")
    parser.add_argument(
        "--test-seconds",
        type=float,
        default=Limits.all_tests,
        metavar="S",
        help="limit on the time of one mutant's tests, as measured without the mutant",
    )
    parser.add_argument(
        "--only-measure", action="store_true", help="only measure which tests run which functions"
    )
    parser.add_argument("--report", action="store_true", help="print the results so far, and exit")
    return parser.parse_args()


def read(file: Path) -> list[dict[str, Any]]:
    """Read lines of JSON; skip an incomplete last line and remove it from the file."""
    if not file.is_file():
        return []
    text = file.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


class Log:
    """A file of JSON lines that several threads append to."""

    def __init__(self, file: Path) -> None:
        self.rows = read(file)
        self._file = file
        self._lock = threading.Lock()

    def append(self, row: dict[str, Any]) -> None:
        with self._lock:
            self.rows.append(row)
            with self._file.open("a") as file:
                file.write(json.dumps(row) + "\n")


def interval(killed: int, judged: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion (Wilson score interval)."""
    z, share = 1.96, killed / judged
    middle = share + z * z / (2 * judged)
    half = z * math.sqrt(share * (1 - share) / judged + z * z / (4 * judged * judged))
    return (middle - half) / (1 + z * z / judged), (middle + half) / (1 + z * z / judged)


def report(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line for each tree and group."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["ref"], row["group"]].append(row)
    lines = ["| tree | group | detected | share | 95 % interval | not judged | CPU s each |"]
    lines.append("|---|---|---|---|---|---|---|")
    for (ref, group), some in sorted(groups.items()):
        judged = [row for row in some if row["result"] not in REFUSED]
        killed = sum(row["result"] in KILLED for row in judged)
        if judged:
            low, high = interval(killed, len(judged))
            each = sum(row["seconds"] for row in some) / len(judged)
            lines.append(
                f"| {ref} | {group} | {killed}/{len(judged)} | {killed / len(judged):.1%} | "
                f"{low:.1%} to {high:.1%} | {len(some) - len(judged)} | {each:.0f} |"
            )
    return "\n".join(lines)


class Draws:
    """Returns mutants from the groups in turn, in the order of the draw. Thread-safe."""

    def __init__(self, tree: Path, groups: list[str], seed: int, count: int) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._draws: dict[str, Iterator[tuple[int, Mutant]]] = {
            group: enumerate(draw(tree, group, seed)) for group in groups
        }
        self._taken = dict.fromkeys(groups, 0)  # judged, or being judged
        self.known: set[tuple[str, int]] = set()

    def learn(self, group: str, number: int, result: str) -> None:
        """Count a mutant that was judged in an earlier run."""
        if group in self._taken:
            self.known.add((group, number))
            self._taken[group] += result not in REFUSED

    def next(self) -> tuple[str, int, Mutant] | None:
        with self._lock:
            wanted = [group for group, taken in self._taken.items() if taken < self._count]
            for group in sorted(wanted, key=self._taken.__getitem__):
                for number, mutant in self._draws[group]:
                    if (group, number) not in self.known:
                        self._taken[group] += 1
                        return group, number, mutant
            return None

    def replace(self, group: str) -> None:
        """Draw another mutant to replace a mutant that cannot be judged."""
        with self._lock:
            self._taken[group] -= 1


def in_each_place(places: list[Place], work: Callable[[Place], bool], deadline: float) -> None:
    """Call `work` repeatedly in each place until `work` returns False or the deadline passes."""

    def loop(place: Place) -> None:
        try:
            while time.monotonic() < deadline and work(place):
                pass
        except Exception:
            traceback.print_exc()

    # Daemons: the run ends at the deadline, and a later run judges unfinished mutants again.
    threads = [threading.Thread(target=loop, args=[place], daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
    for place in places:
        place.stop()


def measured(places: list[Place], log: Log, deadline: float, limits: Limits) -> list[TestFile]:
    """Measure the test files that are missing from the log; return all measured test files."""
    known = {row["path"] for row in log.rows}
    left: queue.SimpleQueue[str] = queue.SimpleQueue()
    for test in test_files(places[0].tree):
        if test not in known:
            left.put(test)

    def work(place: Place) -> bool:
        try:
            test = left.get_nowait()
        except queue.Empty:
            return False
        row = dataclasses.asdict(measure(place, test, limits))
        if time.monotonic() < deadline:
            log.append(row)
        return True

    in_each_place(places, work, deadline)
    return [TestFile(**row) for row in log.rows]


def name_of(ref: str) -> str:
    """Return a name for a tree's results that does not change when a branch advances."""
    if Path(ref).is_file():
        return Path(ref).stem
    command = ["git", "rev-parse", "--short", ref]
    return subprocess.check_output(command, cwd=ROOT, text=True).strip()


def run(asked: argparse.Namespace, folder: Path, results: Log) -> None:
    start = time.monotonic()
    deadline = start + asked.seconds
    name = name_of(asked.ref)
    limits = Limits(all_tests=asked.test_seconds)
    first = Place.create(folder / "0", asked.ref, asked.nice)
    places = [first, *(first.copy(folder / str(n)) for n in range(1, asked.workers))]
    print(f"{name}: built after {time.monotonic() - start:.0f} s", flush=True)
    tests = measured(places, Log(asked.out / f"tests-{name}.jsonl"), deadline, limits)
    failed = [failure for test in tests for failure in test.failed]
    unusable = [test.path for test in tests if not test.usable]
    print(f"{len(tests)} test files; without {failed + unusable}", flush=True)
    if asked.only_measure or time.monotonic() > deadline:  # all tests must be known
        return
    judge = Judge(tests, limits)
    draws = Draws(first.tree, asked.group or list(GROUPS), asked.seed, asked.count)
    for row in results.rows:
        if (row["ref"], row["seed"]) == (name, asked.seed):
            draws.learn(row["group"], row["number"], row["result"])
            if "by" in row:
                judge.learn(row["by"])

    def work(place: Place) -> bool:
        drawn = draws.next()
        if drawn is None:
            return False
        group, number, mutant = drawn
        result = judge.judge(place, mutant)
        if time.monotonic() >= deadline:  # its tests may have been killed
            return False
        if result["result"] in REFUSED:
            draws.replace(group)
        row = {"ref": name, "seed": asked.seed, "group": group, "number": number}
        results.append({**row, **dataclasses.asdict(mutant), **result})
        return True

    in_each_place(places, work, deadline)


def main() -> int:
    asked = arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    results = Log(asked.out / "mutants.jsonl")
    if not asked.report:
        folder = Path(tempfile.mkdtemp(prefix="mut"))
        try:
            run(asked, folder, results)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(error)
            return 1
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(report(results.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
