"""Write the table of SGLang's versions in docs/sglang.md, from the record of `make recipes`.

usage: sglang_table.py     writes it between the markers of the page
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memsaver.integrations.sglang import versions

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "sglang.md"
RECORD = ROOT / "benchmarks" / "results" / "sglang_versions.json"
BEGIN, END = "<!-- versions: begin -->", "<!-- versions: end -->"
HOOKS = ("release_and_resume", "requests_asleep", "weight_updates")
HEAD = [
    "| SGLang | hooks: release, resume | hooks: requests asleep | hooks: weight updates "
    "| tests on the simulated driver | it has no | on a GPU |",
    "|---|---|---|---|---|---|---|",
]


def is_good(result: Mapping[str, Any]) -> bool:
    """Return whether all hooks attach to a version, and all tests pass."""
    return bool(result["passed"]) and not result["failed"] and all(result["hooks"].values())


def table(record: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table, with the newest version first."""
    return "\n".join([*HEAD, *(row(name, record[name]) for name in reversed(record))])


def row(name: str, result: Mapping[str, Any]) -> str:
    """Return a version's row."""
    attached = ["attach" if result["hooks"].get(purpose) else "**missing**" for purpose in HOOKS]
    tests = f"{result['passed']} pass"
    if result["failed"]:
        tests += f", **{len(result['failed'])} fail**"
    gpu = "run" if name in versions.TRIED else "not run"
    return f"| {' | '.join([name, *attached, tests, ', '.join(result['lacks']), gpu])} |"


def rewritten(page: str) -> str:
    """Return the page with the table between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(json.loads(RECORD.read_text()))}\n{END}{after}"


def main() -> None:
    """Write the table."""
    PAGE.write_text(rewritten(PAGE.read_text()))


if __name__ == "__main__":
    main()
