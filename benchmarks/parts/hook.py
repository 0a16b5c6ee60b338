"""Measure the hooks' overhead outside any region (see hook_overhead.py)."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import results


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield hook_overhead.py's rows with all keys of `Measurement`.

    The ratio is computed by `results.ratio`.
    """
    try:
        import hook_overhead

        found = hook_overhead.measure()
    except (ImportError, RuntimeError) as error:
        failures.append(f"hook: {error}")
        return
    for row in found:
        yield {
            **row,
            "ratio": results.ratio(row["memsaver"], row["peer_value"]),
            "limit": None,
        }
