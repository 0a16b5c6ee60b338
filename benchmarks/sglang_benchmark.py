"""Code shared by the benchmarks of SGLang engines."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import results
import runs
from sglang_engine import used_mib, why_no_peer
from sglang_model import BIG, SMALL, write_config


def parser(
    description: str | None, parts: Mapping[str, runs.Measure], wait: float, touch_gib: float
) -> argparse.ArgumentParser:
    """Return a command line with the options that all of these benchmarks have.

    Args:
        description: the benchmark's docstring.
        parts: the names of the parts.
        wait: the default of --wait, in seconds.
        touch_gib: the default of --touch-gib, in GiB.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--wait", type=float, default=wait, help="seconds of rest before memory is released")
    help_touch = "GiB of host memory to touch first; 0: none"
    add("--touch-gib", type=float, default=touch_gib, help=help_touch)
    add("--small", action="store_true", help="a model of 4 layers, to try this out")
    add("--only", type=runs.part_names(parts), default=",".join(parts), help=",".join(parts))
    add("--output", type=Path, default=results.DEFAULT_PATH)
    add("--peer", action=argparse.BooleanOptionalAction, default=True)
    made.set_defaults(device="cuda")
    return made


def run(
    parts: Mapping[str, runs.Measure],
    options: argparse.Namespace,
    needs_peer: bool,
    check: Callable[[], object] = lambda: None,
) -> int:
    """Run the selected parts with a new model, and return an exit status.

    Args:
        parts: the parts by name, in the order of measuring.
        options: the options; the model's path and the initial memory in use are added to them.
        needs_peer: whether torch_memory_saver must be installed.
        check: a function that raises RuntimeError if another requirement is missing.
    """
    wrong = _why_not(options, needs_peer, check)
    if wrong:
        print(wrong, file=sys.stderr)
        return 2
    options.compiled = False
    options.output = options.output.resolve()
    with tempfile.TemporaryDirectory(prefix="memsaver-bench-") as folder:
        options.model = Path(folder)
        write_config(SMALL if options.small else BIG, options.model)
        return runs.run([parts[name] for name in parts if name in options.only], options)


def _why_not(options: argparse.Namespace, needs_peer: bool, check: Callable[[], object]) -> str:
    """Describe a missing requirement; "" if there is none."""
    if importlib.util.find_spec("sglang") is None:
        return "SGLang is not installed"
    missing = why_no_peer() if needs_peer else ""
    if missing:
        return (
            f"{missing}: put its wheel (0.0.10), unpacked, into PYTHONPATH, or measure memsaver "
            "alone with --no-peer"
        )
    try:
        check()
        options.idle_mib = used_mib()
    except RuntimeError as error:
        return str(error)
    return ""
