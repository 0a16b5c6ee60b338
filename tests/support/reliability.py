"""Writes benchmarks/results/reliability.json, the results of the long-running checks."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from repository import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"


def record(key: str, figures: Mapping[str, object], path: Path = RESULTS) -> None:
    """Add a check's results to the file, with the date, commit and machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = json.loads(path.read_text()) if path.exists() else {}
    held[key] = {
        **figures,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {"cpus": len(os.sched_getaffinity(0))},
    }
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(held, indent=2, sort_keys=True) + "\n")
    fresh.replace(path)


def _commit() -> str:
    told = os.environ.get("BENCH_COMMIT")  # for example, a copy of the tree without git
    if told:
        return told
    git = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return git.stdout.strip() or "unknown"
