"""`make faults`: makes every call of every scenario fail and reports violations.

Exits with 1 if a fault was not handled correctly. `--only` selects faults: a scenario,
scenario:call, or a complete scenario:call:nth:code:once|forever in the form that the sweep prints.
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
from faults.injections import Injection
from faults.scenarios import SCENARIOS

ALWAYS = 6


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--only", action="append", default=[], metavar="SCENARIO[:CALL[:...]]")
    parser.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help=f"after the first {ALWAYS} calls of a function in an act, fail only every Nth call",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=5,
        metavar="N",
        help="number of processes at a time; they often wait for the disk",
    )
    parser.add_argument(
        "--package",
        type=Path,
        default=ROOT,
        metavar="FOLDER",
        help="the folder that contains the package memsaver (default: this repository)",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the figures to reliability.json"
    )
    return parser.parse_args()


def is_chosen(injection: Injection, only: list[str], every: int) -> bool:
    if only and not any(f"{injection}:".startswith(f"{prefix}:") for prefix in only):
        return False
    return injection.nth <= ALWAYS or (injection.nth + injection.forever) % every == 0


def named(only: list[str]) -> dict[str, list[Injection] | None]:
    """Return the scenarios to run, each with its injections or with None for all possible faults.

    Raises ValueError for an invalid injection.
    """
    if not only or not all(prefix.count(":") == 4 for prefix in only):
        names = [n for n in SCENARIOS if not only or any(p.split(":")[0] == n for p in only)]
        return dict.fromkeys(names)
    by_scenario: dict[str, list[Injection] | None] = {}
    for injection in map(Injection.parse, only):
        by_scenario[injection.scenario] = [*(by_scenario.get(injection.scenario) or ()), injection]
    return by_scenario


def sweep(place: lanes.Workplace, asked: argparse.Namespace) -> dict[str, collections.Counter[str]]:
    """Run all injections and print failures; return the number of each result, by scenario.

    Raises RuntimeError if a scenario fails without a fault, and ValueError for an invalid
    injection.
    """

    def chosen(injection: Injection) -> bool:
        return is_chosen(injection, asked.only, asked.every)

    results: dict[str, collections.Counter[str]] = {}
    pool = concurrent.futures.ThreadPoolExecutor(asked.workers)
    try:
        tried = [
            pool.submit(lanes.sweep, place, name, injections, chosen)
            for name, injections in named(asked.only).items()
        ]
        for done in concurrent.futures.as_completed(tried):
            name, outcomes = done.result()
            if outcomes:
                results[name] = collections.Counter(result for _, result, _ in outcomes)
                print(f"{name}: {len(outcomes)} faults tried", flush=True)
            for injection, result, why in outcomes:
                if result not in ("passed", "unmet"):
                    print(f"{result.upper()} {injection}: {why.rstrip()}", flush=True)
                    print(f'  alone: make faults ARGS="--only {injection}"', flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def main() -> int:
    asked = arguments()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memsaver-faults-") as folder:
        place = lanes.Workplace(Path(folder), asked.package)
        try:
            by_scenario = sweep(place, asked)
        except (RuntimeError, ValueError) as error:
            print(error)
            return 1
    if not by_scenario:
        print(f"no fault is {', '.join(asked.only)}: the scenarios are {', '.join(SCENARIOS)}")
        return 1
    results = sum(by_scenario.values(), collections.Counter())
    seconds = round(time.monotonic() - start, 1)
    injected = results.total() - results["unmet"]
    passed, failed = results["passed"], injected - results["passed"]
    scenarios = len(by_scenario)
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
