"""Write the tables of engine versions in docs/, from the records of `make recipes`.

usage: version_tables.py     writes the tables between the markers in the pages
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsaver.integrations.sglang import versions as sglang_versions
from memsaver.integrations.vllm import versions as vllm_versions

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- versions: begin -->", "<!-- versions: end -->"


@dataclass(frozen=True)
class Engine:
    """An engine whose versions a page lists.

    Attributes:
        title: the engine's name in text.
        package: the engine's package name, which is also the name of its page and of its record.
        hooks: the column titles, by the purpose of the hooks.
        tried: the versions that have run on a GPU.
    """

    title: str
    package: str
    hooks: Mapping[str, str]
    tried: tuple[str, ...]

    @property
    def page(self) -> Path:
        """The path of the page with the table."""
        return ROOT / "docs" / f"{self.package}.md"

    @property
    def record(self) -> dict[str, dict[str, Any]]:
        """The results by version."""
        path = ROOT / "benchmarks" / "results" / f"{self.package}_versions.json"
        return dict(json.loads(path.read_text()))

    def table(self) -> str:
        """Return the table, with the newest version first."""
        hooks = [f"hooks: {name}" for name in self.hooks.values()]
        head = [self.title, *hooks, "tests on the simulated driver", "it has no", "on a GPU"]
        rows = [self.row(name, result) for name, result in reversed(self.record.items())]
        return "\n".join(line(cells) for cells in [head, ["---"] * len(head), *rows])

    def row(self, name: str, result: Mapping[str, Any]) -> list[str]:
        """Return a version's row."""
        hooks = ["attach" if result["hooks"].get(one) else "**missing**" for one in self.hooks]
        tests = f"{result['passed']} pass"
        if result["failed"]:
            tests += f", **{len(result['failed'])} fail**"
        gpu = "run" if name in self.tried else "not run"
        return [name, *hooks, tests, ", ".join(result["lacks"]), gpu]

    def rewritten(self, page: str) -> str:
        """Return the text of the page with the table between the markers."""
        before, rest = page.split(BEGIN)
        _, after = rest.split(END)
        return f"{before}{BEGIN}\n{self.table()}\n{END}{after}"


ENGINES = {
    "sglang": Engine(
        "SGLang",
        "sglang",
        {
            "release_and_resume": "release, resume",
            "requests_asleep": "requests asleep",
            "weight_updates": "weight updates",
        },
        sglang_versions.TRIED,
    ),
    "vllm": Engine(
        "vLLM",
        "vllm",
        {
            "allocator": "allocator",
            "sleep_and_wake_up": "sleep, wake-up",
            "requests asleep": "requests asleep",
            "graph_pool": "CUDA graphs",
        },
        vllm_versions.TRIED,
    ),
}


def line(cells: list[str]) -> str:
    """Return a line of a Markdown table."""
    return "|---" * len(cells) + "|" if cells[0] == "---" else f"| {' | '.join(cells)} |"


def is_good(result: Mapping[str, Any]) -> bool:
    """Return whether all hooks attach to a version and all tests with this version pass."""
    return bool(result["passed"]) and not result["failed"] and all(result["hooks"].values())


def main() -> None:
    """Write the tables."""
    for engine in ENGINES.values():
        engine.page.write_text(engine.rewritten(engine.page.read_text()))


if __name__ == "__main__":
    main()
