"""Fill in the GPU runs of training frameworks in README.md's table of supported software."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from libraries import OURS

COLUMN = 2  # the index of the GPU runs in a table line that is split at "|"
TITLES = {"slime": "slime", "miles": "miles", "xtuner": "xtuner", "lightrft": "LightRFT"}
COUNTS = {1: "one", 2: "two", 5: "five"}


def cells(
    rows: Sequence[Mapping[str, Any]],
    replayed: Sequence[Mapping[str, Any]],
    shown: Mapping[str, Sequence[str]],
) -> dict[str, str]:
    """Return the GPU runs, keyed by the beginning of each framework's line.

    Args:
        rows: the rows of the results.
        replayed: the rows of replayed calls.
        shown: the lists of calls that each page of replayed calls shows.
    """
    found = {row["metric"]: row for row in rows}
    done = {row["framework"] for row in replayed if row["saver"] == OURS}
    made = {
        f"| [{TITLES[page]}](": _calls(TITLES[page], names, done) for page, names in shown.items()
    }
    return made | {"| [verl](": _verl(found), "| [TRL](": _trl(found)}


def _calls(title: str, names: Sequence[str], done: set[str]) -> str:
    ran = [name for name in names if name in done]
    if not ran:
        return ""
    some = "" if len(ran) == len(names) else f" ({', '.join(f'`{name}`' for name in ran)})"
    return f"(its calls{some}, without {title})"


def _verl(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = {
        gpus: found[metric]
        for metric, gpus in (("verl_step_seconds", 1), ("verl_tp2_step_seconds", 2))
        if metric in found
    }
    parts = [_steps(len(row["detail"]["memsaver_phases"]["step"]), n) for n, row in rows.items()]
    return f"{_versions(rows.values(), 'verl', 'sglang', 'SGLang')}{'; '.join(parts)}"


def _trl(found: Mapping[str, Mapping[str, Any]]) -> str:
    row = found.get("trl_step_seconds")
    if row is None:
        return ""
    return f"{_versions([row], 'trl', 'vllm', 'vLLM')}{_steps(len(row['detail']['losses']), 1)}"


def _steps(steps: int, gpus: int) -> str:
    return f"{COUNTS.get(steps, steps)} steps on {COUNTS[gpus]} GPU{'s' * (gpus > 1)}"


def _versions(rows: Iterable[Mapping[str, Any]], trainer: str, engine: str, title: str) -> str:
    ran = {f"{row['versions'][trainer]} with {title} {row['versions'][engine]}" for row in rows}
    return f"{' and '.join(sorted(ran))}: " if ran else ""


def rewritten(readme: str, runs: Mapping[str, str]) -> str:
    """Return the README with the GPU runs of the frameworks replaced."""
    lines = readme.splitlines(keepends=True)
    for begin, text in runs.items():
        (place,) = (number for number, line in enumerate(lines) if line.startswith(begin))
        parts = lines[place].split("|")
        parts[COLUMN] = f" {text} " if text else " "
        lines[place] = "|".join(parts)
    return "".join(lines)
