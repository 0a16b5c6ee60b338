"""Parse the command line of a benchmark of inference engines, and run the benchmark."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import results
import runs
from engine_model import BIG, SMALL, write_config
from engine_process import used_mib


def parser(
    description: str | None, parts: Mapping[str, runs.Measure], wait: float, touch_gib: float
) -> argparse.ArgumentParser:
    """Return a command-line parser with the options that all engine benchmarks share.

    Args:
        description: the benchmark's docstring.
        parts: the parts by name.
        wait: the default of --wait, in seconds.
        touch_gib: the default of --touch-gib, in GiB.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--wait", type=float, default=wait, help="seconds to wait before each release")
    help_touch = "GiB of host memory to write to first; 0: none"
    add("--touch-gib", type=float, default=touch_gib, help=help_touch)
    add("--small", action="store_true", help="use a model with 4 layers, for a quick trial")
    add("--only", type=runs.part_names(parts), default=",".join(parts), help=",".join(parts))
    add("--output", type=Path, default=results.DEFAULT_PATH)
    add("--peer", action=argparse.BooleanOptionalAction, default=True)
    made.set_defaults(device="cuda")
    return made


def run(
    parts: Mapping[str, runs.Measure],
    options: argparse.Namespace,
    why_not: Callable[[], str],
) -> int:
    """Run the selected parts with a new model, and return an exit status.

    The first SIGTERM during the run raises SystemExit, so the processes of engines and trainers
    exit.

    Args:
        parts: the parts by name, in the order of measurement.
        options: the options; the function adds the model's path and the memory initially in use.
        why_not: a function that describes a missing requirement, or returns ""; it may raise
            RuntimeError instead.
    """
    try:
        wrong = why_not()
        options.idle_mib = used_mib() if not wrong else 0
    except RuntimeError as error:
        wrong = str(error)
    if wrong:
        print(wrong, file=sys.stderr)
        return 2
    options.compiled = False
    options.output = options.output.resolve()
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with tempfile.TemporaryDirectory(prefix="memsaver-bench-") as folder:
            options.model = Path(folder)
            write_config(SMALL if options.small else BIG, options.model)
            return runs.run([parts[name] for name in parts if name in options.only], options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another signal would interrupt the cleanup
    sys.exit(128 + signal.SIGTERM)
