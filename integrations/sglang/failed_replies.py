"""SGLang's replies to failed control requests, built from its own classes."""

from __future__ import annotations

import functools
import inspect
from typing import Any

__all__ = ["failed_reply", "fields_of"]


def failed_reply(messages: Any, kind: str, text: str) -> Any:
    """Return the reply that SGLang sends for a failed request of this kind."""
    reply = getattr(messages, _name_of_reply(kind))
    fields = fields_of(reply)
    values: dict[str, Any] = {
        name: value
        for name, value in (("success", False), ("message", text), ("error_message", text))
        if name in fields
    }
    if not values:  # the reply is a bare value, and None means failure
        values = {name: None for name, needed in fields.items() if needed}
    return reply(**values)


def _name_of_reply(kind: str) -> str:
    stem = kind.removesuffix("Input").removesuffix("Req")
    return f"{stem}ReqOutput"


@functools.cache
def fields_of(reply: type) -> dict[str, bool]:
    """Return the arguments of a reply's class, and whether each argument is required."""
    parameters = inspect.signature(reply).parameters.values()
    return {p.name: p.default is inspect.Parameter.empty for p in parameters}
