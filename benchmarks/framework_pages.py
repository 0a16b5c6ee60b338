"""Write the tables of docs/how-to's pages of RL frameworks from the results of their runs.

usage: framework_pages.py     writes them between the pages' markers

verl's table is from the rows `verl_*` of the benchmark `frameworks`; the other tables are from the
calls that framework_calls.py replayed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import results
from framework_steps import FRAMEWORKS
from libraries import OURS
from measured_page import table

PAGES = results.ROOT / "docs" / "how-to"
CALLS = results.DEFAULT_PATH.with_name("framework_calls.json")
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"
NOT_RUN = "These calls have not been run on a GPU yet."
VERL_NOT_RUN = "verl has not been run on a GPU yet."

# The pages, and the frameworks whose calls each shows.
SHOWN: dict[str, tuple[str, ...]] = {
    "slime": ("slime", "miles", "miles_disk", "miles_rematerialize"),
    "xtuner": ("xtuner",),
    "lightrft": ("lightrft",),
}


def circumstances(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence with the GPUs, dates and versions of the rows."""
    found = {
        f"{row['gpu']}, {row['date']}, "
        + ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        for row in rows
    }
    return f"Run on: {'; '.join(sorted(found))}."


def verl(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return verl's table for the rows of all benchmarks."""
    shown = [row for row in rows if row["metric"].startswith("verl_")]
    if not shown:
        return VERL_NOT_RUN
    return "\n".join([circumstances(shown), "", *table(list(shown))])


def calls(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the tables of the named frameworks' calls; the medians of the rounds."""
    parts = []
    for name in names:
        row = next((row for row in rows if (row["framework"], row["saver"]) == (name, OURS)), None)
        title = f"`{name}` ({FRAMEWORKS[name].source})"
        if row is None:
            parts += [f"{title}: {NOT_RUN}", ""]
            continue
        parts += [f"{title}, {row['rounds']} rounds. {circumstances([row])}", ""]
        parts += ["| call | ms | MiB in use afterwards |", "|---|--:|--:|"]
        for step in map(str, FRAMEWORKS[name].round):
            same = [each for each in row["steps"] if each["step"] == step]
            milliseconds = statistics.median(each["seconds"] for each in same) * 1e3
            used = statistics.median(each["used_MiB"] for each in same)
            parts.append(f"| `{step}` | {milliseconds:,.1f} | {used:,.0f} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def rewritten(page: str, text: str) -> str:
    """Return a page with the text between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def pages() -> dict[Path, str]:
    """Return the pages for the current result files."""
    replayed = json.loads(CALLS.read_text()) if CALLS.exists() else []
    found = {PAGES / "verl.md": verl(results.read(results.DEFAULT_PATH))}
    found |= {PAGES / f"{page}.md": calls(replayed, names) for page, names in SHOWN.items()}
    return {path: rewritten(path.read_text(), text) for path, text in found.items()}


def main() -> None:
    """Write the tables."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
