"""Parses JSON from another process, and checks each field. Raises `EngineError` for any defect.

JSON allows lone surrogates, which no encoding can represent. Lone surrogates are escaped, so
messages that contain them can be printed and sent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from typing import Any, NoReturn, TypeGuard

from memsaver._runtime.redaction import redacted

from .errors import EngineError

__all__ = ["Fields", "encodable", "is_encodable", "is_number", "is_whole", "parsed"]

_SHOWN_CHARACTERS = 200
_MOST = 1 << 63


def parsed(text: str, source: str) -> Any:
    """Parse JSON text.

    Args:
        text: the JSON text.
        source: a description of the text's origin, for error messages.
    """
    try:
        return json.loads(text)
    except ValueError:
        raise EngineError(f"{source} is not JSON") from None
    except RecursionError:
        raise EngineError(f"{source} is JSON nested too deeply") from None


def encodable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_encodable(value: object) -> TypeGuard[str]:
    """Return whether the value is text without lone surrogates."""
    return isinstance(value, str) and encodable(value) == value


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether the value is an integer of at most 64 bits, and not a boolean."""
    return type(value) is int and -_MOST <= value < _MOST


def is_number(value: object) -> bool:
    """Return whether the value is a finite number, and not a boolean."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


class Fields:
    """A JSON object whose fields are checked as they are read.

    Args:
        value: the object.
        source: a description of the object's origin, for error messages.
    """

    def __init__(self, value: Any, source: str) -> None:
        self._source = source
        if not isinstance(value, dict):
            raise EngineError(f"{source} must be a JSON object, not {type(value).__name__}")
        self._fields: dict[str, Any] = value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        return encodable(self._read(name, str, "a string", default))

    def flag(self, name: str) -> bool:
        """Return a boolean."""
        return bool(self._read(name, bool, "true or false"))

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a 64-bit integer."""
        value = self._get(name, default)
        return value if is_whole(value) else self._refuse(name, "an integer", value)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._get(name, default)
        return float(value) if is_number(value) else self._refuse(name, "a number", value)

    def texts(self, name: str, known: Collection[str] | None = None) -> tuple[str, ...]:
        """Return a list of strings; () if missing. If given, `known` must contain every string."""
        values = self._read(name, (list, tuple), "a list", [])
        for value in values:
            if not isinstance(value, str):
                self._refuse(name, "a list of strings", value)
            if known is not None and value not in known:
                self._refuse(name, f"a list of some of {', '.join(known)}", value)
        return tuple(encodable(value) for value in values)

    def wholes(self, name: str) -> dict[str, int]:
        """Return an object whose values are integers; {} if missing."""
        values = self._read(name, dict, "an object", {})
        for value in values.values():
            if not is_whole(value):
                self._refuse(name, "an object of integers", value)
        return {encodable(key): value for key, value in values.items()}

    def each(self, name: str) -> list[Any]:
        """Return a list with elements of any type; [] if missing."""
        return list(self._read(name, (list, tuple), "a list", []))

    def optional(self, name: str) -> Any:
        """Return a value of any type; None if missing."""
        return self._fields.get(name)

    def _get(self, name: str, default: Any) -> Any:
        value = self._fields.get(name, default)
        if value is None:
            raise EngineError(f"{self._source} has no {name!r}")
        return value

    def _read(self, name: str, kind: Any, words: str, default: Any = None) -> Any:
        value = self._get(name, default)
        return value if isinstance(value, kind) else self._refuse(name, words, value)

    def _refuse(self, name: str, words: str, value: object) -> NoReturn:
        try:
            shown = redacted(repr(value))[:_SHOWN_CHARACTERS]
        except (ValueError, RecursionError):  # an integer with thousands of digits
            shown = f"a {type(value).__name__}"
        raise EngineError(f"{self._source}: {name!r} must be {words}, not {shown}")
