"""Creates the ids of an engine's requests, and builds samples from its outputs."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable
from typing import Any

from memsaver._runtime.redaction import redacted
from memsaver._runtime.text import plain_text

from .errors import EngineError
from .fields import encodable, is_whole
from .interface import Sample

__all__ = ["INVALID", "excerpt", "format_error", "request_ids", "sample"]

# The exceptions that reading an output in an invalid format can raise.
INVALID = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def request_ids(count: int) -> list[str]:
    """Return new ids for a call's requests."""
    name = f"memsaver-{uuid.uuid4().hex}"
    return [f"{name}-{number}" for number in range(count)]


def sample(
    token_ids: Iterable[Any], logprobs: Iterable[Any] | None, finish: Any, version: Any
) -> Sample:
    """Return a sample.

    Args:
        token_ids: the generated tokens.
        logprobs: the tokens' log-probabilities, or None; an individual None becomes NaN. After an
            abort, the numbers of tokens and of log-probabilities might differ.
        finish: the reason why the generation ended.
        version: the version of the weights, or None.

    Raises:
        TypeError, ValueError: a value is invalid.
    """
    tokens = list(token_ids)
    if not all(map(is_whole, tokens)):
        raise TypeError("token ids must be integers")
    numbers = None if logprobs is None else [_number(one) for one in logprobs]
    if numbers is not None and len(numbers) != len(tokens):
        if finish != "abort":
            raise ValueError(f"{len(numbers)} log-probabilities for {len(tokens)} tokens")
        both = min(len(numbers), len(tokens))  # the abort left lists of unequal length
        tokens, numbers = tokens[:both], numbers[:both]
    shown = None if version is None else encodable(str(version))
    return Sample(tokens, numbers, encodable(str(finish)), shown)


def format_error(engine: str, output: Any, error: Exception) -> EngineError:
    """Return the error for an output that could not be read because of `error`."""
    return EngineError(
        f"the engine's output does not have {engine}'s format ({type(error).__name__}: {error}): "
        f"{excerpt(output)}"
    )


def excerpt(value: Any) -> str:
    """Return the beginning of a value's text, without secrets, for a message."""
    return plain_text(redacted(str(value)))[:200]


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, float) or is_whole(value):
        return float(value)
    raise TypeError(f"a log-probability must be a number, not {type(value).__name__}")
