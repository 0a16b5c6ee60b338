"""Write the tables of docs/how-to's pages of frameworks whose calls were replayed.

usage: framework_calls_page.py     writes them between the pages' markers
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

PAGES = results.ROOT / "docs" / "how-to"
CALLS = results.DEFAULT_PATH.with_name("framework_calls.json")
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"
NOT_RUN = "These calls have not been run on a GPU yet."

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


def calls(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the tables of the named frameworks' calls; the medians of the rounds."""
    parts = []
    for name in names:
        row = next((row for row in rows if (row["framework"], row["saver"]) == (name, OURS)), None)
        title = f"`{name}` ({FRAMEWORKS[name].source})"
        steps = list(map(str, FRAMEWORKS[name].round))
        if row is None:
            parts += [f"{title}: {NOT_RUN}", "", *(f"- `{step}`" for step in steps), ""]
            continue
        parts += [f"{title}, {row['rounds']} rounds. {circumstances([row])}", ""]
        parts += ["| call | ms | MiB in use afterwards |", "|---|--:|--:|"]
        for step in steps:
            same = [each for each in row["steps"] if each["step"] == step]
            milliseconds = statistics.median(each["seconds"] for each in same) * 1e3
            used = statistics.median(each["used_MiB"] for each in same)
            parts.append(f"| `{step}` | {milliseconds:,.1f} | {used:,.0f} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def rewritten(page: str, text: str) -> str:
    """Return a page in which the text replaces everything between the markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def pages() -> dict[Path, str]:
    """Return the pages for the current result files."""
    replayed = json.loads(CALLS.read_text()) if CALLS.exists() else []
    found = {PAGES / f"{page}.md": calls(replayed, names) for page, names in SHOWN.items()}
    return {path: rewritten(path.read_text(), text) for path, text in found.items()}


def main() -> None:
    """Write the tables."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
