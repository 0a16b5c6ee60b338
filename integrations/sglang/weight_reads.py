"""A hook for SGLang's reads of single weights, whose replies contain no text."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from ..engine.refusals import asleep_error
from ..engine.tags import WEIGHTS
from .admissions import admission_of, call

__all__ = ["by_name"]

_WHAT = "read its weights"
_admitted = call(_WHAT)


async def by_name(original: Callable[..., Awaitable[Any]], manager: Any, *args: Any) -> Any:
    """Wrap `TokenizerControlMixin.get_weights_by_name`."""
    return await _admitted(functools.partial(_read, original), manager, *args)


async def _read(original: Callable[..., Awaitable[Any]], manager: Any, *args: Any) -> Any:
    """Read a weight. Raises `EngineAsleepError` if the schedulers refuse the request.

    A reply without a value means either a refusal or an unknown name. If the weights are mapped
    after such a reply, they may have been resumed since a refusal, so the request is sent again.
    """
    for _ in range(2):
        result = await original(manager, *args)
        admission = admission_of(manager)
        if admission is None or not _lacks_value(result):
            break
        if WEIGHTS in await admission.refresh():
            raise asleep_error(admission.released, _WHAT)
    return result


def _lacks_value(result: Any) -> bool:
    """Return whether the result is None, or a list with None for at least one scheduler."""
    return result is None or (isinstance(result, list) and any(one is None for one in result))
