"""Define the goals of the benchmarks, and print the results with their goals in a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from libraries import DEFAULT, PEERS, RETAINED


@dataclass(frozen=True)
class Goal:
    """A goal for a row. Exactly one of the first four attributes is set.

    Attributes:
        ratio: the minimum ratio.
        at_most: the maximum value of memsaver.
        alone: a value that memsaver must reach and the peer must not reach.
        within: the maximum difference between memsaver's value and the peer's.
        peer: the peer to which the goal applies; None for all peers.
        otherwise: another metric; reaching its goal is sufficient.
    """

    ratio: float | None = None
    at_most: float | None = None
    alone: float | None = None
    within: float | None = None
    peer: str | None = None
    otherwise: str | None = None

    def is_met(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row reaches this goal, ignoring `otherwise`."""
        if self.at_most is not None:
            return float(row["memsaver"]) <= self.at_most
        if self.alone is not None:
            return float(row["peer_value"]) < self.alone <= float(row["memsaver"])
        if self.within is not None:
            return float(row["memsaver"]) - float(row["peer_value"]) <= self.within
        return self.ratio is None or float(row["ratio"]) >= self.ratio

    def __str__(self) -> str:
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        if self.within is not None:
            return f"+ {self.within:g}"
        return f">= {self.alone:g} alone" if self.alone is not None else f"{self.ratio:.3f}"


VLLM = {  # ratios on one GPU
    "sleep_first_ms": 10.0,
    "sleep_changed_ms": 1.15,
    "sleep_unchanged_ms": 12.0,
    "wake_weights_ms": 1.35,
    "wake_kv_ms": 1.0,
    "decode_tokens_per_s": 0.99,
    "resident_MiB": 1.0,
}
# Patterns of metrics; the first match applies. Metrics without a match have no goal.
GOALS: tuple[tuple[str, Goal | None], ...] = (
    ("*_at_once_ms", None),
    ("kv_*_ms", Goal(1.0)),
    ("discarded_*_ms", Goal(1.3)),
    ("many_*_ms", Goal(5.0)),
    ("backed_first_pause_ms", Goal(12.0, peer=PEERS[DEFAULT])),
    ("backed_changed_pause_ms", Goal(14.0, peer=PEERS[DEFAULT])),
    ("backed_changed_resume_ms", Goal(4.5, peer=PEERS[DEFAULT])),
    ("backed_changed_*_rate", Goal(0.97)),
    ("backed_unchanged_pause_ms", Goal(20.0, peer=PEERS[RETAINED])),
    ("verl_*sleep_wake_seconds", Goal(5.0)),
    ("verl_*step_seconds", Goal(1.0)),
    ("verl_*kv_tokens", Goal(1.0)),
    ("verl_*cycles_change_MiB", Goal(at_most=64)),
    ("verl_*left_MiB", Goal(at_most=64)),
    ("swap_16GB_ms", Goal(1.7)),
    ("swap_*_spaced_ms", None),
    ("swap_*_ms", Goal(5.0)),
    ("two_gpu_backed_pause_ms", Goal(round(1 / 1.15, 4))),
    ("peer_*_16GB_ms", Goal(5.0)),
    ("share_16GB_ms", Goal(at_most=10)),
    ("update_from_region_ms", Goal(1.5)),
    ("disk_pause_ms", Goal(2.0, otherwise="disk_pause_rate")),
    ("disk_resume_ms", Goal(2.0, otherwise="disk_resume_rate")),
    ("disk_pause_rate", Goal(0.9, otherwise="disk_pause_ms")),
    ("disk_resume_rate", Goal(0.9, otherwise="disk_resume_ms")),
    ("host_overhead_paused_MiB", Goal(at_most=256)),
    ("host_overhead_trimmed_MiB", Goal(at_most=64)),
    ("region_bandwidth*", Goal(0.99)),
    ("malloc_free_pair_*", Goal(round(1 / 1.01, 4))),
    ("sglang_release_weights_first_ms", None),
    ("sglang_release_weights_ms", Goal(12.0)),
    ("sglang_release_weights_unchanged_ms", Goal(40.0)),
    ("sglang_resume_weights_ms", Goal(4.0)),
    ("sglang_*_kv_ms", Goal(1.0)),
    ("sglang_decode_tokens_per_s", Goal(0.99)),
    ("sglang_resident_MiB", Goal(at_most=1126)),
    ("sglang_resident_tp2*_MiB", Goal(at_most=1433)),
    ("sglang_resume_tp2*_ms", Goal(within=200)),
    ("sglang_switch_ms", Goal(4.0, peer=PEERS[DEFAULT])),
    ("sglang_storm_answered_requests", Goal(1.0)),
    ("sglang_max_mem_fraction", Goal(alone=0.9)),
    *((f"vllm_{name}", Goal(ratio)) for name, ratio in VLLM.items()),
    *((f"vllm_tp2_{name}", Goal(round(0.85 * ratio, 4))) for name, ratio in VLLM.items()),
    ("trl_sleep_wake_seconds", Goal(3.0)),
    ("trl_sleep_wake_later_seconds", Goal(1.2)),
    ("rl_kv_tokens_fraction", Goal(0.97, peer="memsaver, the engine alone on the GPU")),
    ("rl_step_overhead_seconds", Goal(2.0, peer=PEERS[RETAINED])),
    ("rl_transition_seconds", Goal(5.0, peer=PEERS[DEFAULT])),
)

# Goals for a build compared with an earlier one (paired.py).
PAIRED = Goal(round(1 / 1.03, 4))
PAIRED_SHORT = Goal(round(1 / 1.1, 4))
SHORT_MS = 30.0


def goal(row: Mapping[str, Any]) -> Goal | None:
    """Return the goal of a row, or None."""
    if row.get("bench") == "paired":
        return PAIRED_SHORT if row["peer_value"] < SHORT_MS else PAIRED
    found = next((goal for pattern, goal in GOALS if fnmatchcase(row["metric"], pattern)), None)
    return found if found and found.peer in (None, row["peer"]) else None


def verdict(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return whether a row reaches its goal, as "", "yes", "by METRIC", "not met" or "no peer"."""
    wanted = goal(row)
    if wanted is None:
        return ""
    if row["ratio"] is None and wanted.at_most is None:
        return "no peer"
    if wanted.is_met(row):
        return "yes"
    for other in rows:
        instead = goal(other)
        if other["metric"] == wanted.otherwise and instead and instead.is_met(other):
            return f"by {wanted.otherwise}"
    return "not met"


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", "memsaver", "peer", "peer's", "limit", "ratio", "goal", "met")
    for column in table.columns:
        if column.header in ("memsaver", "peer's", "limit", "ratio", "goal"):
            column.justify = "right"
    for row in rows:
        met = verdict(row, rows)
        table.add_row(
            row["metric"],
            f"{row['memsaver']:.2f}",
            row["peer"],
            "ended" if row["peer_value"] is None else f"{row['peer_value']:.2f}",
            "" if row["limit"] is None else f"{row['limit']:.2f}",
            "" if row["ratio"] is None else f"{row['ratio']:.3f}",
            str(goal(row) or ""),
            f"[bold red]{met}" if met == "not met" else met,
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)
