"""Measure steps of verl's trainer alone; see parts/frameworks_verl.py.

python benchmarks/verl_steps.py [--verl-only steps,cycles,fractions,interrupted]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys

import engine_benchmark
from parts import frameworks_verl

MEASURES = {"verl": frameworks_verl.measure}


def why_not() -> str:
    """Return the missing requirements; "" if there are none."""
    missing = [name for name in ("verl", "sglang", "ray") if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = engine_benchmark.parser(__doc__, MEASURES, wait=0.5, touch_gib=0)
    made.set_defaults(small=True)
    frameworks_verl.add_options(made)
    return made


if __name__ == "__main__":
    sys.exit(engine_benchmark.run(MEASURES, parser().parse_args(), why_not))
