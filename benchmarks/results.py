"""The file of benchmark results: a JSON list of rows, never edited by hand.

Several benchmarks share one file. Writing a row replaces the row with the same bench, metric and
peer and keeps all others, so that one benchmark can be rerun on its own.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PATH = ROOT / "benchmarks" / "results" / "h200.json"
ON_H100 = DEFAULT_PATH.with_name("h100.json")  # metrics without a measurement on an H200
COUNTS = ("_tokens", "_requests")  # suffixes of metrics that are whole numbers
DISTRIBUTIONS = (
    "memsaver",
    "torch",
    "torch_memory_saver",
    "sglang",
    "vllm",
    "transformers",
    "accelerate",
    "trl",
    "verl",
    "ray",
)


class Measurement(TypedDict):
    """A benchmark's result for one metric against one peer."""

    bench: str  # the benchmark's name
    # The suffix of the name is the unit: _ms, _ns, _s, _seconds, _MiB, _GiB, _GBps, _tokens,
    # _tokens_per_s, _requests. Names of fractions contain "fraction"; the unit of all other names
    # is percent.
    metric: str
    memsaver: float  # the median, or the detail's `average`
    peer: str  # the library or setting that memsaver is compared with
    peer_value: float | None  # the peer's median, in the same unit; None if the peer failed
    # How many times better memsaver is: above 1 is better for every unit. None without a peer's
    # value.
    ratio: float | None
    limit: float | None  # the driver's own value, measured in the same run


class Row(Measurement, total=False):
    """A measurement with its circumstances. `detail` is optional."""

    gpu: str
    versions: dict[str, str]  # of the driver, and of DISTRIBUTIONS if installed
    commit: str
    date: str  # ISO 8601
    detail: dict[str, Any]  # every value behind the medians, in the order of measurement


KEYS = (*Measurement.__annotations__, "gpu", "versions", "commit", "date", "detail")


def ratio(memsaver: float, peer: float, *, higher_is_better: bool = False) -> float:
    """Return the factor by which memsaver's value is better than the peer's."""
    return round(memsaver / peer if higher_is_better else peer / memsaver, 4)


def measurement(
    metric: str,
    memsaver: Sequence[float],
    peer: str,
    theirs: Sequence[float],
    limit: Sequence[float] | None = None,
    *,
    bench: str = "pause_resume",
    higher_is_better: bool = False,
    average: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, Any]:
    """Return the row of a metric, from all values.

    Amounts of memory may be zero or, because of noise, negative; the ratio is computed with at
    least 1 MiB for each.
    """
    digits = 4 if "fraction" in metric else 3
    ours, others = (round(average(values), digits) for values in (memsaver, theirs))
    least = 1.0 if metric.endswith("_MiB") else 0.0
    detail = {"memsaver": list(memsaver), "peer": list(theirs)}
    if limit is not None:
        detail["limit"] = list(limit)
    return {
        "bench": bench,
        "metric": metric,
        "memsaver": ours,
        "peer": peer,
        "peer_value": others,
        "ratio": ratio(max(ours, least), max(others, least), higher_is_better=higher_is_better),
        "limit": None if limit is None else round(average(limit), 3),
        "detail": detail,
    }


def unanswered(
    metric: str, memsaver: Sequence[float], peer: str, why: str, *, bench: str
) -> dict[str, Any]:
    """Return the row of a metric for which the peer has no value, with the reason."""
    return {
        "bench": bench,
        "metric": metric,
        "memsaver": round(statistics.median(memsaver), 3),
        "peer": peer,
        "peer_value": None,
        "ratio": None,
        "limit": None,
        "detail": {"memsaver": list(memsaver), "peer": [], "peer_failed": why},
    }


def percentage(
    metric: str, memsaver_ms: Sequence[float], peer: str, peer_ms: Sequence[float]
) -> dict[str, Any]:
    """Return the row of memsaver's rate as a percentage of the peer's rate for the same bytes."""
    percent = round(100 * statistics.median(peer_ms) / statistics.median(memsaver_ms), 2)
    return {
        "bench": "pause_resume",
        "metric": metric,
        "memsaver": percent,
        "peer": peer,
        "peer_value": 100.0,
        "ratio": ratio(percent, 100.0, higher_is_better=True),
        "limit": None,
        "detail": {"memsaver_ms": list(memsaver_ms), "peer_ms": list(peer_ms)},
    }


def stamp() -> dict[str, Any]:
    """Return the circumstances of a run on this machine. Creates no CUDA context."""
    gpu, driver = _gpu_and_driver()
    versions = {"driver": driver}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name == "memsaver":  # used from its source tree
                import memsaver

                versions[name] = memsaver.__version__
    return {
        "gpu": gpu,
        "versions": versions,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file; none if the file does not exist."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text())
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not a list of rows")
    return rows


def measured() -> list[dict[str, Any]]:
    """Return the H200's rows, and the H100s' rows for metrics that the H200 lacks."""
    rows = read(DEFAULT_PATH)
    known = {row["metric"] for row in rows}
    return rows + [row for row in read(ON_H100) if row["metric"] not in known]


def write(
    path: Path, measured: Iterable[Mapping[str, Any]], circumstances: Mapping[str, Any]
) -> int:
    """Stamp the measurements and merge them into the file; return its number of rows.

    A row with the same bench, metric and peer is replaced in place.
    """
    # Not imported at the top: paired.py's children import this module with an earlier memsaver.
    from memsaver._runtime.whole_files import replace_file

    new: dict[tuple[str, str, str], dict[str, Any]] = {}
    for measurement in measured:
        row = {**measurement, **circumstances}
        new[_identity(row)] = {key: row[key] for key in KEYS if key in row}
    rows = [new.pop(_identity(row), row) for row in read(path)]
    rows += new.values()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    )  # one line per row, for diffs
    replace_file(path, text.encode())
    return len(rows)


def versions_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return all versions of each package in the rows."""
    names = dict.fromkeys(name for row in rows for name in row["versions"])
    return ", ".join(
        f"{name} {' and '.join(sorted({row['versions'].get(name) for row in rows} - {None}))}"
        for name in names
    )


def _identity(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(row["bench"]), str(row["metric"]), str(row["peer"])


def _output(*command: str, directory: Path | None = None) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _gpu_and_driver() -> tuple[str, str]:
    query = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    # The benchmarks use the first of several visible GPUs.
    first = (_output(*query) or "").split("\n")[0]
    name, _, driver = first.rpartition(", ")
    if name:
        return name, driver
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split("\n")[0].split()
        driver = next(word for word in words if word.replace(".", "").isdigit() and "." in word)
        model = next(iter(Path("/proc/driver/nvidia/gpus").glob("*/information"))).read_text()
        return model.split("Model:")[1].split("\n")[0].strip(), driver
    except (OSError, StopIteration, IndexError):
        return "unknown", "unknown"


def _commit() -> str:
    told = os.environ.get("BENCH_COMMIT")  # for example, if the tree is a copy without a repository
    commit = told or _output("git", "rev-parse", "HEAD", directory=ROOT)
    if told or not commit:
        return told or "unknown"
    changed = _output("git", "status", "--porcelain", "csrc", "memsaver", directory=ROOT)
    return commit + ("+changes" if changed else "")
