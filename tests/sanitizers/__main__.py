"""`make sanitize`: runs the core, the hooks and the simulator under sanitizers.

One build detects address errors, undefined behavior and leaks. Another build detects data races.
Both builds run the stress test of tests/native/stress and the native test programs, several
programs at a time. The first build also runs tests of the Python package and scenarios of `make
faults`. Exits with 1 if a sanitizer reports an error or a check fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import reliability

from build_support.native import Variant
from build_support.variants import ASAN, TSAN
from sanitizers import checks
from sanitizers.builds import Build
from sanitizers.checks import Outcome, Place

Check = Callable[[], Outcome]
CHECKS = 3  # at a time, for two cores: checks wait for threads, files and processes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make sanitize", description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=6, metavar="N", help="number of stress tests of each build"
    )
    parser.add_argument("--first-seed", type=int, default=1, metavar="N")
    parser.add_argument(
        "--operations",
        type=int,
        default=400,
        metavar="N",
        help="number of operations of each thread",
    )
    parser.add_argument(
        "--only", choices=["stress", "units", "suite", "faults"], help="run only these checks"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the figures to reliability.json"
    )
    return parser.parse_args()


def built(variant: Variant, asked: argparse.Namespace) -> Build:
    """Build a variant's libraries and the program that the checks will run concurrently."""
    made = Build(variant, package=variant is ASAN and asked.only in (None, "suite", "faults"))
    if variant is ASAN or asked.only in (None, "stress"):
        made.stress()
    return made


def planned(
    asked: argparse.Namespace, place: Place, builds: Sequence[Build]
) -> tuple[list[Check], list[Check]]:
    """Return the checks to run, in order.

    Several checks of the first list run at the same time because each check spends some time
    waiting. The checks of the second list use all cores.
    """
    one_core: list[Check] = []
    all_cores: list[Check] = []
    for build in builds:
        variant = build.variant
        leaks = variant is ASAN and checks.leaks_are_found(place, build)
        if variant is ASAN and not leaks:
            print("leaks are not looked for: the leak sanitizer needs ptrace, which is forbidden")
        if asked.only in (None, "units"):
            one_core.append(functools.partial(checks.units, place, build))
        if asked.only in (None, "stress"):
            for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
                one_core.append(
                    functools.partial(checks.stress, place, build, seed, asked.operations, leaks)
                )
        if asked.only in (None, "suite") and variant is ASAN:
            all_cores.append(functools.partial(checks.suite, place, build))
        if asked.only in (None, "faults") and variant is ASAN:
            all_cores.append(functools.partial(checks.faults, place, build))
    return one_core, all_cores


def run(check: Check) -> Outcome:
    """Run a check and print its outcome."""
    began = time.monotonic()
    outcome = check()
    figures = ", ".join(f"{count} {what}" for what, count in outcome.figures.items())
    seconds = time.monotonic() - began
    text = f"{outcome.name}: {figures}, {outcome.failed} failed ({seconds:.0f} s)"
    print("\n".join([text, outcome.text] if outcome.failed else [text]), flush=True)
    return outcome


def main() -> int:
    asked = arguments()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="memsaver-sanitize-") as folder:
        with concurrent.futures.ThreadPoolExecutor(CHECKS) as pool:
            # Both at once: each ends with a long compilation on one core.
            builds = list(pool.map(functools.partial(built, asked=asked), (ASAN, TSAN)))
            one_core, all_cores = planned(asked, Place(Path(folder)), builds)
            outcomes = list(pool.map(run, one_core))
        outcomes += map(run, all_cores)
    passed = sum(outcome.passed for outcome in outcomes)
    failed = sum(outcome.failed for outcome in outcomes)
    if asked.write:
        sums = {
            what: sum(outcome.figures.get(what, 0) for outcome in outcomes)
            for what in ("operations", "tests", "faults")
        }
        figures_of_all: dict[str, object] = {
            "stresses": sum("operations" in outcome.figures for outcome in outcomes),
            **sums,
            "passed": passed,
            "failed": failed,
            "seconds": round(time.monotonic() - start, 1),
        }
        reliability.record("sanitizers", figures_of_all)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
