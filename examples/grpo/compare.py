"""Compare two runs, bit for bit. The exit status is 1 if the runs differ.

python compare.py sleeping.json plain.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from results import Results

# Results that depend only on seeds and settings; durations and peaks depend on the machine.
FIGURES = ("answers", "reward", "right", "loss", "gradient", "gap")


def differences(first: Results, second: Results) -> list[str]:
    """Return descriptions of the differences between two runs, in the order of steps."""
    found = []
    settings = {
        name: (first.settings[name], second.settings.get(name))
        for name in first.settings
        if name != "sleep" and first.settings[name] != second.settings.get(name)
    }
    if settings:
        return [f"they have different settings: {settings}"]
    if first.ranks != second.ranks:
        found.append(f"{first.ranks} and {second.ranks} ranks")
    if len(first.steps) != len(second.steps):
        found.append(f"{len(first.steps)} and {len(second.steps)} steps")
    for number, (a, b) in enumerate(zip(first.steps, second.steps, strict=False)):
        for name in FIGURES:
            if getattr(a, name) != getattr(b, name):
                found.append(f"step {number}: {name} {getattr(a, name)} and {getattr(b, name)}")
    if first.weights != second.weights:
        found.append(f"the weights at the end: {first.weights[:12]} and {second.weights[:12]}")
    return found


def main(paths: list[str]) -> int:
    """Compare two result files and return the exit status."""
    if len(paths) != 2:
        print("usage: python compare.py FIRST.json SECOND.json", file=sys.stderr)
        return 2
    try:
        first, second = (Results.load(Path(path)) for path in paths)
    except (OSError, ValueError) as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    found = differences(first, second)
    if not found:
        print(f"the same, bit for bit: {len(first.steps)} steps, weights {first.weights[:12]}")
        return 0
    print("\n".join(["they differ:", *found[:10]]))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
