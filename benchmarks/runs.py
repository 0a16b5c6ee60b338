"""Run the parts of a benchmark one after the other, and save their results."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import report
import results
from children import Failed

# Yields rows, and appends failed measurements to the list of failures.
Measure = Callable[[argparse.Namespace, list[str]], Iterator[dict[str, Any]]]


def run(measures: Iterable[Measure], options: argparse.Namespace) -> int:
    """Run the parts, save each row immediately in `options.output`, and return an exit status.

    Results are preserved even if the run is killed.
    """
    circumstances = results.stamp()
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    count = 0
    for measure in measures:
        start = time.monotonic()
        try:
            for row in measure(options, failures):
                rows.append(row)
                count = results.write(options.output, [row], circumstances)
        except Failed as error:
            failures.append(str(error))
        except Exception as error:  # an error in one part must not discard other results
            traceback.print_exc()
            failures.append(f"{measure.__module__}: {type(error).__name__}: {error}")
        name = measure.__module__.removeprefix("parts.")
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if rows:
        report.show(rows)
        print(f"{options.output}: {count} rows, {len(rows)} of them from this run")
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def part_names(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser for the value of --only."""
    names = list(known)

    def parse(text: str) -> list[str]:
        chosen = [part.strip() for part in text.split(",") if part.strip()]
        if not chosen or set(chosen) - set(names):
            raise argparse.ArgumentTypeError(f"choose from {', '.join(names)}, separated by commas")
        return chosen

    return parse


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser for integers that are at least `least`."""

    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{least} or more")
        return number

    return parse
