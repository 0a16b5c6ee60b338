"""Search for the largest KV cache that fits, starting as few engines as possible.

An engine that fits reports its minimum free memory. The next engine uses this memory for a larger
KV cache. The cache of the second engine is therefore near the largest size, and the third engine
confirms it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RESOLUTION = 0.004  # share of the tokens; smaller differences are not worth another engine
KEEP = 256 << 20  # bytes that a proposal leaves free, because engines differ
STEP_BACK = 0.01  # relative reduction after the first failure; doubled after each further failure


@dataclass(frozen=True)
class Trial:
    """The result of running one engine.

    Attributes:
        tokens: the size of the engine's KV cache in tokens.
        spare: the minimum free memory in bytes; None if the engine did not fit.
        why: the reason why the engine did not fit.
    """

    tokens: int
    spare: int | None = None
    why: str = ""


@dataclass
class Search:
    """The trials for one engine configuration.

    Args:
        cell: the bytes of the KV cache per token.
    """

    cell: int
    trials: list[Trial] = field(default_factory=list)

    @property
    def best(self) -> Trial | None:
        """Return the largest trial that fits."""
        return max((one for one in self.trials if not one.why), key=_tokens, default=None)

    @property
    def failing(self) -> Trial | None:
        """Return the smallest trial that does not fit and is above the largest trial that fits."""
        least = self.best.tokens if self.best else 0
        larger = (one for one in self.trials if one.why and one.tokens > least)
        return min(larger, key=_tokens, default=None)

    @property
    def is_settled(self) -> bool:
        """Return whether the largest size is known to the required resolution."""
        return self.best is not None and self.proposal() is None

    def proposal(self) -> int | None:
        """Return the KV cache size to try next, in tokens.

        Returns None before the first trial or if another trial would not be useful.
        """
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
            return None  # engines do not accept more tokens
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
