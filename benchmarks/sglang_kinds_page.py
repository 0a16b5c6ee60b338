"""Write the table of engine kinds in docs/sglang.md from benchmarks/results/sglang_kinds.json.

usage: sglang_kinds_page.py     writes it between the page's markers
"""

from __future__ import annotations

from typing import Any

import results
from sglang_kind_table import KINDS, Kind
from sglang_kinds import NOT_RUN, RESULTS

PAGE = results.ROOT / "docs" / "sglang.md"
BEGIN, END = "<!-- kinds: begin -->", "<!-- kinds: end -->"
ERROR_CHARACTERS = 160
FEW = 1.2  # tokens per verification, of which almost none are the draft's


def rewritten(page: str, rows: list[dict[str, Any]]) -> str:
    """Return the page with the table of these rows."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{after}"


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the rows, after a line with the GPUs and versions of the runs."""
    runs = {
        f"{row['gpu']}, memsaver {row['versions']['memsaver']}, "
        f"SGLang {row['versions'].get('sglang', 'unknown')}"
        for row in rows
        if "date" in row
    }
    by_name = {row["name"]: row for row in rows}
    lines = [
        f"{'; '.join(sorted(runs)) or 'No kind was run yet'}.",
        "",
        "| kind | resumed | updated | updated, no backup | release, ms | resume, ms "
        "| KV, weights, graphs, MiB | GPU, date, commit | |",
        "|---|---|---|---|--:|--:|--:|---|---|",
    ]
    for kind in KINDS:
        row = by_name.get(kind.name, {"resumed": NOT_RUN, "why": "not recorded"})
        sizes = row.get("released_MiB", {})
        cells = (
            kind.title,
            row["resumed"],
            row.get("updated", ""),
            row.get("updated_without_backup", ""),
            _number(row.get("release_ms")),
            _number(row.get("resume_ms")),
            ", ".join(f"{size:,}" for size in sizes.values()),
            _run_of(row),
            _note(kind, row),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _run_of(row: dict[str, Any]) -> str:
    """Return the GPU, the date and the commit of a row; "" if the kind was not run."""
    if "date" not in row:
        return ""
    gpu = row["gpu"].removeprefix("NVIDIA ").partition(" ")[0]
    return f"{gpu}, {row['date']}, {row['commit'][:7]}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _note(kind: Kind, row: dict[str, Any]) -> str:
    """Describe the details that a row's other cells do not show."""
    notes = [row["why"]] if "why" in row else []
    if not kind.update and row["resumed"] != NOT_RUN:
        notes.append("SGLang cannot update such weights")
    if kind.reloads and row["resumed"] != NOT_RUN:
        notes.append(
            "updates are compared with updates of the awake engine, because SGLang's updates give "
            "other outputs than a fresh engine, even without memsaver"
        )
    if "tokens_per_verification" in row:
        tokens = row["tokens_per_verification"]  # of the engine before its first release
        lost = ", so a lost draft is not visible here" if tokens < FEW else ""
        notes.append(f"{tokens} tokens per verification{lost}")
    if "host_tier" in row:
        tokens = " and ".join(f"{count:,} ({what})" for what, count in row["host_tier"].items())
        notes.append(
            f"prompt tokens read from the host tier, by the tags that were released: {tokens}"
        )
    refusing = [mode for mode, pause in row.get("pauses", {}).items() if pause["refused"]]
    if refusing:
        notes.append(f"a release is refused while requests are paused: {', '.join(refusing)}")
    for which, error in row.get("errors", {}).items():
        text = " ".join((error["log"] or error["text"]).split())[:ERROR_CHARACTERS]
        notes.append(f"{which.replace('_', ' ')}, {error['step']}: `{_plain(text)}`")
    return "; ".join(notes)


def _plain(text: str) -> str:
    """Return the text in a form that is safe in a table cell and in backquotes."""
    return text.replace("|", "/").replace("`", "'")


def main() -> None:
    """Write the table."""
    PAGE.write_text(rewritten(PAGE.read_text(), results.read(RESULTS)))


if __name__ == "__main__":
    main()
