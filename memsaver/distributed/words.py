"""Arguments in words, for calls that the ranks compare. Take anything, and never raise."""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["listed", "side"]


def listed(tags: Iterable[object]) -> str:
    """Return tags in words, the same for every order."""
    return ", ".join(_texts(tags))


def side(tags: object) -> str:
    """Return a tag, or several, in words: "'w'", "['kv', 'w']"."""
    # By its type: an odd object answers an `isinstance` in its own way.
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
    # Of a string as it is, whatever a subclass makes of `repr`; of others the type alone.
    return str.__repr__(tag) if issubclass(type(tag), str) else f"a {type(tag).__name__}"
