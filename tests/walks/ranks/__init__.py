"""A random walk with collective calls, interrupts, killed ranks, and arguments that differ between
ranks.

Each round is a group of two to four processes that use gloo on the loopback interface and make the
same random calls. After each call, the ranks compare their outcomes (see `process`). No rank waited
longer than the documented limit. The errors are typed, and all ranks raise the same error. The tags
are all paused or all mapped. The contents are intact. In about a third of the rounds, one rank is
killed.
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
ROUND_SECONDS = 240.0  # the longest round, mostly the ranks' timeouts
MILLISECONDS = 40.0  # the latest signal after a call's begin: about the duration of a call


def walk(seed: int, seconds: float) -> dict[str, object]:
    """Run rounds for about `seconds` seconds; return how often each event happened."""
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
    """Choose a call for all ranks, with each rank's invalid arguments and events."""
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
    """Run a round; return the ranks' counts of events."""
    victim = plan["victim"]
    code = f"from walks.ranks.process import play\nplay({plan!r})\n"
    with tempfile.TemporaryDirectory(prefix="memsaver-ranks-") as folder:
        # A failure's error contains the output of the ranks.
        quiet = contextlib.redirect_stdout(io.StringIO())
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
