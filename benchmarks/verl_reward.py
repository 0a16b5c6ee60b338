"""The measured verl trainer's reward for even words in a response; verl loads this file."""

from __future__ import annotations

import os
from typing import Any

FAILURE = "VERL_REWARD_FAILS_AFTER"  # the variable with the number of rewards before a failure

_given = 0


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """Return the fraction of a response's words that are even, such as "t0" and "t2"."""
    global _given
    _given += 1
    if _given > int(os.environ.get(FAILURE, _given)):
        raise RuntimeError(f"{FAILURE}={os.environ[FAILURE]}: this reward was to fail")
    words = solution_str.split()
    even = sum(word[-1] in "02468" for word in words)
    return even / len(words) if words else 0.0
