"""Ranks that are interrupted, killed and given different arguments at every collective call.

Each round is a group of two to four processes on gloo over the loopback interface, which make the
same random calls. After each call all of them compare what they got (see `process`): nobody waited
longer than the documented bound, the errors are typed and the same on all ranks, the tags are all
paused or all mapped, and the contents are intact. In every third round one of them is killed.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import rank_processes

CALLS = ("pause", "resume", "swap", "paused", "gather", "gathered", "on_leader", "reports")
OF_TAGS = CALLS[:4]
TAGS = ("host", "pageable", "disk")  # by their backups
STEPS = 12
ROUND_SECONDS = 240.0  # most of it for the timeouts that the ranks are given
MILLISECONDS = 40.0  # within which signals come: about as long as a call takes


def walk(seed: int, seconds: float) -> dict[str, object]:
    """Play rounds for about `seconds` seconds; return how often what happened."""
    dice = random.Random(seed)
    figures: Counter[str] = Counter()
    end = time.monotonic() + seconds
    while time.monotonic() < end or not figures:
        size = dice.randint(2, 4)
        victim = dice.randrange(size) if dice.random() < 1 / 3 else None
        steps = [step(dice, size) for _ in range(STEPS)]
        plan = {"steps": steps, "victim": victim, "at": dice.random() * MILLISECONDS / 1e3}
        figures.update(played(plan, size))
    return dict(figures)


def step(dice: random.Random, size: int) -> dict[str, Any]:
    """One call of all ranks; by rank, a bad argument or an event."""
    call = dice.choice(CALLS)
    tags = dice.sample(TAGS, dice.randint(1, len(TAGS)))
    chosen: dict[str, Any] = {"call": call, "tags": tags, "odd": {}, "events": {}}
    if dice.random() < 0.3:
        kinds = ("tag", "name", "backup", "timeout", "group", "call")
        kind = dice.choice(kinds if call in OF_TAGS else ("value", "error", "call"))
        chosen["odd"][str(dice.randrange(size))] = kind
    if dice.random() < 0.6:
        kind = dice.choices(("interrupt", "callback", "late", "hang"), (12, 2, 2, 1))[0]
        delay = dice.random() * MILLISECONDS / 1e3
        chosen["events"][str(dice.randrange(size))] = [kind, delay]
    return chosen


def played(plan: dict[str, Any], size: int) -> Counter[str]:
    """Play a round; what happened in it, by the words of the ranks."""
    victim = plan["victim"]
    code = f"from walks.ranks.process import play\nplay({plan!r})\n"
    with tempfile.TemporaryDirectory(prefix="memsaver-ranks-") as folder:
        quiet = contextlib.redirect_stdout(io.StringIO())  # a failure has what the ranks printed
        try:
            with quiet:
                said = rank_processes.run(
                    code,
                    size,
                    Path(folder),
                    statuses={} if victim is None else {victim: -9},
                    timeout=ROUND_SECONDS,
                )
        except AssertionError as error:
            raise AssertionError(f"{size} ranks, {plan}:\n{error}") from None
    counts: Counter[str] = Counter({"rounds": 1})
    for text in said:
        for line in text.splitlines():
            if line.startswith("{"):
                counts.update(json.loads(line))
    return counts
