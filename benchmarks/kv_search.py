"""The search for the largest KV cache that fits, with few engines.

An engine that fits tells how much memory was left at its tightest moment. The next one gets a KV
cache that uses that up; so the second engine is near the largest, and the third settles it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RESOLUTION = 0.004  # of the tokens: what is not worth another engine
KEEP = 256 << 20  # bytes that a proposal leaves: no two engines are the same
STEP_BACK = 0.01  # of the tokens, after the first that does not fit; then twice as many


@dataclass(frozen=True)
class Trial:
    """What became of an engine.

    Attributes:
        tokens: of its KV cache.
        spare: bytes that were left at the tightest moment; None where it did not fit.
        why: what happened where it did not fit.
    """

    tokens: int
    spare: int | None = None
    why: str = ""


@dataclass
class Search:
    """The trials of one way to use the memory.

    Args:
        cell: bytes of the KV cache for each token.
    """

    cell: int
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        """The largest that fits."""
        return max((one for one in self.trials if not one.why), key=_tokens, default=None)

    @property
    def failing(self) -> Trial | None:
        """The smallest that does not fit, of those larger than the largest that does."""
        least = self.best.tokens if self.best else 0
        larger = (one for one in self.trials if one.why and one.tokens > least)
        return min(larger, key=_tokens, default=None)

    @property
    def is_settled(self) -> bool:
        """Whether the largest is known as closely as it is looked for."""
        return self.best is not None and self.proposal() is None

    def proposal(self) -> int | None:
        """How many tokens to try next; None where no other is worth it, or nothing is known."""
        best, failing = self.best, self.failing
        if failing is None and best is None:
            return None
        failures = sum(1 for one in self.trials if one.why)
        back = STEP_BACK * 2 ** (failures - 1)
        if best is None:
            assert failing is not None
            return int(failing.tokens * (1 - min(back, 0.5))) or None
        assert best.spare is not None
        if sum(one.tokens == best.tokens for one in self.trials) > 1:
            return None  # engines do not take more, whatever is asked for
        wanted = best.tokens + (best.spare - KEEP) // self.cell
        if wanted - best.tokens <= RESOLUTION * best.tokens:
            return None
        if failing is not None and wanted >= failing.tokens:
            if failing.tokens - best.tokens <= RESOLUTION * best.tokens:
                return None
            middle = (best.tokens + failing.tokens) // 2
            wanted = max(middle, int(failing.tokens * (1 - back)))
        return wanted


def _tokens(trial: Trial) -> int:
    return trial.tokens
