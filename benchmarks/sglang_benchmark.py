"""Run a benchmark of SGLang engines, if its requirements are installed."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Mapping

import engine_benchmark
import runs
from sglang_engine import why_no_peer


def run(
    parts: Mapping[str, runs.Measure],
    options: argparse.Namespace,
    needs_peer: bool,
    check: Callable[[], object] = lambda: None,
) -> int:
    """Run the selected parts with a new model, and return an exit status.

    Args:
        parts: the parts by name, in the order of measurement.
        options: the options; see `engine_benchmark.run`.
        needs_peer: whether torch_memory_saver must be installed.
        check: a function that raises RuntimeError if another requirement is missing.
    """

    def why_not() -> str:
        if importlib.util.find_spec("sglang") is None:
            return "SGLang is not installed"
        missing = why_no_peer() if needs_peer else ""
        if missing:
            return (
                f"{missing}: put its wheel (0.0.10), unpacked, into PYTHONPATH, or measure "
                "memsaver alone with --no-peer"
            )
        check()
        return ""

    return engine_benchmark.run(parts, options, why_not)
