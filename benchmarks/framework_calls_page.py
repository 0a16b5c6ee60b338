"""Write the tables of replayed calls in docs/how-to, and the runs of frameworks in README.md.

usage: framework_calls_page.py     writes them between the pages' markers and into README.md's table
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import framework_support
import results
from framework_steps import ENGINE, FRAMEWORKS, TRAINER, Step
from framework_tables import circumstances
from libraries import DEFAULT, OURS, PEERS

README = results.ROOT / "README.md"
PAGES = results.ROOT / "docs" / "how-to"
CALLS = results.DEFAULT_PATH.with_name("framework_calls.json")
BEGIN, END = "<!-- runs: begin -->", "<!-- runs: end -->"
PEER = PEERS[DEFAULT]
NOT_RUN = "These calls have not been run on a GPU yet."
NOT_COMPARED = f"These calls have not been run with {PEER} on this model of GPU yet."
MOVES = ("release", "resume", "pause")  # the calls that release and map memory

# The pages, and the frameworks whose calls each page shows.
SHOWN: dict[str, tuple[str, ...]] = {
    "slime": ("slime",),
    "miles": ("miles", "miles_disk", "miles_rematerialize"),
    "xtuner": ("xtuner",),
    "lightrft": ("lightrft",),
}

Row = Mapping[str, Any]


def calls(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Return the tables of the named frameworks' calls, with the medians of the rounds."""
    found = {(row["framework"], row["saver"]): row for row in rows}
    return "\n\n".join(
        _calls(name, found.get((name, OURS)), found.get((name, DEFAULT))) for name in names
    )


def _calls(name: str, ours: Row | None, theirs: Row | None) -> str:
    title = f"`{name}` ({FRAMEWORKS[name].source})"
    steps = FRAMEWORKS[name].round
    if ours is None:
        return "\n".join([f"{title}: {NOT_RUN}", "", *(f"- `{step}`" for step in steps)])
    if theirs is not None and theirs["gpu"] != ours["gpu"]:
        theirs = None
    ran = [ours] if theirs is None else [ours, theirs]
    lines = [f"{title}: medians of {ours['rounds']} rounds, on {circumstances(ran)}."]
    if theirs is None:
        lines += [NOT_COMPARED, "", "| call | ms | MiB in use afterwards |", "|---|--:|--:|"]
    else:
        lines += [
            "A factor above 1 means that memsaver is faster.",
            "",
            f"| call | memsaver, ms | {PEER}, ms | factor | memsaver, MiB in use afterwards "
            f"| {PEER}, MiB in use afterwards |",
            "|---|--:|--:|--:|--:|--:|",
        ]
    for step in steps:
        lines.append(_line(f"`{step}`", [_seconds(row, [step]) for row in ran], ran, step))
    moves = [step for step in steps if step.side in (ENGINE, TRAINER) and step.call in MOVES]
    words = "sum of all releases, pauses and resumes"
    lines.append(_line(words, [_seconds(row, moves) for row in ran], ran))
    return "\n".join(lines)


def _seconds(row: Row, steps: Sequence[Step]) -> float:
    """Return the sum of the steps' median durations in seconds."""
    return sum(_median(row, step, "seconds") for step in steps)


def _median(row: Row, step: Step, key: str) -> float:
    return statistics.median(each[key] for each in row["steps"] if each["step"] == str(step))


def _line(
    words: str, seconds: Sequence[float], ran: Sequence[Row], step: Step | None = None
) -> str:
    cells = [words, *(f"{each * 1e3:,.1f}" for each in seconds)]
    if len(ran) == 2:
        cells.append(f"{seconds[1] / seconds[0]:.2f}")
    cells += [f"{_median(row, step, 'used_MiB'):,.0f}" if step else "" for row in ran]
    return f"| {' | '.join(cells)} |"


def rewritten(page: str, text: str) -> str:
    """Return the page with everything between the markers replaced by the text."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def pages() -> dict[Path, str]:
    """Return the new text of each page, generated from the current result files."""
    replayed = json.loads(CALLS.read_text()) if CALLS.exists() else []
    found = {PAGES / f"{page}.md": calls(replayed, names) for page, names in SHOWN.items()}
    written = {path: rewritten(path.read_text(), text) for path, text in found.items()}
    runs = framework_support.cells(results.measured(), replayed, SHOWN)
    return written | {README: framework_support.rewritten(README.read_text(), runs)}


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
