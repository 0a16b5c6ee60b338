"""Define the task: sums with answers that can be checked."""

from __future__ import annotations

import random
from dataclasses import dataclass

RIGHT, WELL_FORMED, NEITHER = 1.0, 0.1, 0.0


@dataclass(frozen=True)
class Problem:
    """A problem and its only correct answer.

    Attributes:
        text: the problem, such as "3+4=".
        answer: the correct answer, such as "7".
    """

    text: str
    answer: str


def problems(count: int, largest: int, seed: int, step: int) -> list[Problem]:
    """Return a step's problems; the same arguments produce the same problems on every machine."""
    chance = random.Random(f"{seed} {step}")
    pairs = [(chance.randint(0, largest), chance.randint(0, largest)) for _ in range(count)]
    return [Problem(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def reward(problem: Problem, answer: str) -> float:
    """Return the reward for an answer from `Vocabulary.decode`, which should end with ".".

    1.0 for the right number, 0.1 for another number, 0.0 for anything else.
    """
    if answer == f"{problem.answer}.":
        return RIGHT
    number = answer[:-1]
    if answer.endswith(".") and number.isascii() and number.isdigit():
        return WELL_FORMED
    return NEITHER
