"""Update docs/how-to/weight_sync.md with the figures for pages that an engine could take over.

The percentages are computed (page_shares.py); the times are read from results/.

usage: take_over_page.py     writes them between the page's markers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import page_shares
import results
from parts.take_over import SLOW_MIB

PAGE = results.ROOT / "docs" / "how-to" / "weight_sync.md"
BEGIN, END = "<!-- take over: begin -->", "<!-- take over: end -->"
NOT_RUN = "The times have not been measured on a GPU yet."


def times(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the measured times as Markdown."""
    by_metric = {row["metric"]: row for row in rows}
    awake, asleep, step = (
        by_metric.get(metric)
        for metric in ("take_over_16GB_ms", "take_over_asleep_16GB_ms", "rl_step_overhead_seconds")
    )
    if awake is None or asleep is None:
        return NOT_RUN
    taken, copied = (asleep["detail"][f"{way}_by_piece_MiB"] for way in ("asleep", "copied"))
    saved, size = max((copied[mib]["all"] - taken[mib]["all"], mib) for mib in taken)
    of_a_step = (
        f",\n{saved / 10 / step['memsaver']:.1f} % of the {step['memsaver']:.2f} s that a step of "
        f"RL takes beyond its own work on one {step['gpu']}"
        if step
        else ""
    )
    lines = [
        f"On one {awake['gpu']}, {awake['date']}, 16 GB of weights, medians in ms "
        f"({SLOW_MIB} MiB: one cycle).",
        f"A copy between mapped tensors takes {awake['peer_value']:.1f} ms.",
        "",
        "| pieces of physical memory | both sides mapped | engine resumes, trainer pauses "
        "| the same with a copy |",
        "|--:|--:|--:|--:|",
    ]
    ways = [awake["detail"]["awake_by_piece_MiB"], taken, copied]
    for mib in ways[0]:
        sums = [f"{way[mib]['all']:,.1f}" for way in ways]
        lines.append(f"| {mib} MiB | {' | '.join(sums)} |")
    most = f"taking over saves at most {saved:.1f} ms compared with a copy ({size} MiB)"
    best = f"With equal pieces, {most}"
    return "\n".join([*lines, "", f"{best}{of_a_step}."])


def rewritten(page: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the page with the times in these rows and the computed percentages."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    shares = page_shares.table(list(page_shares.shares()))
    return f"{before}{BEGIN}\n{times(rows)}\n\n{shares}\n{END}{after}"


def main() -> None:
    """Write the page."""
    PAGE.write_text(rewritten(PAGE.read_text(), results.measured()))


if __name__ == "__main__":
    main()
