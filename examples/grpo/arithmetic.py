"""The task: sums, whose answers can be checked."""

from __future__ import annotations

import random
from dataclasses import dataclass

RIGHT, WELL_FORMED, NEITHER = 1.0, 0.1, 0.0


@dataclass(frozen=True)
class Problem:
    """A problem and its only right answer.

    Attributes:
        text: such as "3+4=".
        answer: such as "7".
    """

    text: str
    answer: str


def problems(count: int, largest: int, seed: int, step: int) -> list[Problem]:
    """Those of a step; the same for the same arguments, on every machine."""
    chance = random.Random(f"{seed} {step}")
    pairs = [(chance.randint(0, largest), chance.randint(0, largest)) for _ in range(count)]
    return [Problem(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def reward(problem: Problem, answer: str) -> float:
    """What an answer is worth, as `Vocabulary.decode` gives it: its end is ".".

    All for the right number, a tenth for any number, nothing for what is none or has no end.
    """
    if answer == f"{problem.answer}.":
        return RIGHT
    number = answer[:-1]
    if answer.endswith(".") and number.isascii() and number.isdigit():
        return WELL_FORMED
    return NEITHER
