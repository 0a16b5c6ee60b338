"""Format calls' arguments, for comparing the calls of different ranks. Never raises."""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["listed", "side"]


def listed(tags: Iterable[object]) -> str:
    """Format tags, independently of their order."""
    return ", ".join(_texts(tags))


def side(tags: object) -> str:
    """Format one tag or several tags, such as "'w'" or "['kv', 'w']"."""
    # Compares the type, because an object may override `isinstance` checks.
    if issubclass(type(tags), str) or not issubclass(type(tags), Collection):
        return _quoted(tags)
    texts = _texts(tags)  # type: ignore[arg-type]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _texts(tags: Iterable[object]) -> list[str]:
    try:
        return sorted({_quoted(tag) for tag in tags})
    except Exception as error:
        return [f"tags that cannot be listed ({type(error).__name__})"]


def _quoted(tag: object) -> str:
    # A string's own characters, even if a subclass overrides `repr`; for other objects only the
    # type.
    return str.__repr__(tag) if issubclass(type(tag), str) else f"a {type(tag).__name__}"
