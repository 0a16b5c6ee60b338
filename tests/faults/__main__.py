"""`make faults`: make every call of every scenario fail, and report violations.

Exits with 1 if a fault was not handled. `--only` selects faults: a scenario, scenario:call, or a
complete scenario:call:nth:code:once|forever, as the sweep prints it.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import sys
import tempfile
import time
from pathlib import Path

import reliability
from repository import ROOT

from faults import lanes
from faults.injections import Injection, injections_of
from faults.scenarios import SCENARIOS

CHUNK = 150  # injections for one worker process
ALWAYS = 6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="SCENARIO[:CALL[:...]]")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help=f"of a call that an act makes more than {ALWAYS} times, each Nth only beyond that",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=3,
        metavar="N",
        help="processes at a time; they wait for the disk",
    )
    parser.add_argument(
        "--package",
        type=Path,
        default=ROOT,
        metavar="FOLDER",
        help="the folder that contains the package memsaver (default: this repository)",
    )
    parser.add_argument("--write", action="store_true", help="figures into reliability.json")
    return parser.parse_args()


def is_chosen(injection: Injection, only: list[str], every: int) -> bool:
    if only and not any(f"{injection}:".startswith(f"{prefix}:") for prefix in only):
        return False
    return injection.nth <= ALWAYS or (injection.nth + injection.forever) % every == 0


def plan(place: lanes.Workplace, only: list[str], every: int, workers: int) -> list[Injection]:
    """Return the injections to try. Raises RuntimeError if a scenario fails without a fault."""
    if only and all(prefix.count(":") == 4 for prefix in only):
        return [Injection.parse(prefix) for prefix in only]
    names = [n for n in SCENARIOS if not only or any(p.split(":")[0] == n for p in only)]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        counts = dict(zip(names, pool.map(lambda n: lanes.count(place, n), names), strict=True))
    found = (injection for name in names for injection in injections_of(name, counts[name]))
    return [injection for injection in found if is_chosen(injection, only, every)]


def sweep(
    place: lanes.Workplace, injections: list[Injection], workers: int
) -> collections.Counter[str]:
    """Run all injections and print failures; return the number of each result."""
    by_scenario: dict[str, list[Injection]] = collections.defaultdict(list)
    for injection in injections:
        by_scenario[injection.scenario].append(injection)
    chunks = [
        some[at : at + CHUNK] for some in by_scenario.values() for at in range(0, len(some), CHUNK)
    ]
    results: collections.Counter[str] = collections.Counter()
    left = collections.Counter({name: len(some) for name, some in by_scenario.items()})
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        tried = [pool.submit(lanes.attempt, place, chunk) for chunk in chunks]
        for done in concurrent.futures.as_completed(tried):
            for injection, result, why in done.result():
                results[result] += 1
                left[injection.scenario] -= 1
                if result not in ("passed", "unmet"):
                    print(f"{result.upper()} {injection}: {why.rstrip()}", flush=True)
                    print(f'  alone: make faults ARGS="--only {injection}"', flush=True)
                if left[injection.scenario] == 0:
                    name = injection.scenario
                    print(f"{name}: {len(by_scenario[name])} faults tried", flush=True)
    return results


def main() -> int:
    asked = arguments()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memsaver-faults-") as folder:
        place = lanes.Workplace(Path(folder), asked.package)
        try:
            injections = plan(place, asked.only, asked.every, asked.workers)
        except (RuntimeError, ValueError) as error:
            print(error)
            return 1
        if not injections:
            print(f"no fault is {', '.join(asked.only)}: the scenarios are {', '.join(SCENARIOS)}")
            return 1
        results = sweep(place, injections, asked.workers)
    seconds = round(time.monotonic() - start, 1)
    injected = results.total() - results["unmet"]
    passed, failed = results["passed"], injected - results["passed"]
    scenarios = len({injection.scenario for injection in injections})
    if asked.write:
        figures = {
            "every": asked.every,
            "injected": injected,
            "passed": passed,
            "failed": failed,
            "not_met": results["unmet"],
            "scenarios": scenarios,
            "seconds": seconds,
        }
        reliability.record("faults", figures)
    print(f"{injected} faults injected into {scenarios} scenarios in {seconds} s")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not injected else 0


if __name__ == "__main__":
    sys.exit(main())
