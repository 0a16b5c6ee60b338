"""Load the native library, and emit the library's warnings.

Loading opens no driver and creates no CUDA context.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from memsaver._runtime.text import did_you_mean
from memsaver.errors import (
    ConfigError,
    MemsaverError,
    MemsaverWarning,
    NotLoadedError,
    UnknownTagError,
    completions,
)

try:
    from memsaver import _C
except ImportError as error:
    _SOURCES = Path(__file__).resolve().parent.parent.parent
    if (_SOURCES / "setup.py").exists():
        raise NotLoadedError(
            f"memsaver's native library cannot be loaded: {_SOURCES} is memsaver's source tree, "
            "and not built; run Python in another folder to use an installed memsaver, or "
            f"`make build` to use this one ({error})"
        ) from error
    raise NotLoadedError(
        f"memsaver's native library cannot be loaded ({error}); reinstall memsaver for this Python"
    ) from error

__all__ = [
    "BACKUPS",
    "LIBRARY_DIR",
    "PART_MARK",
    "STATES",
    "_C",
    "Backup",
    "PartName",
    "State",
    "backup_code",
    "backup_of",
    "check_new_tag",
    "check_tag",
    "checked_backup",
    "emit_warnings",
    "note",
    "policy_of",
    "tag_totals",
]

LIBRARY_DIR = Path(_C.__file__).resolve().parent
"""The folder of libmemsaver.so and its companions."""


State: TypeAlias = Literal["mapped", "saving", "paused", "restoring"]
"""The state of a tag."""

Backup: TypeAlias = Literal["none", "host", "pageable", "disk", "peer"]
"""The place of a paused tag's contents."""

STATES: tuple[State, ...] = get_args(State)  # by ms_state
BACKUPS: tuple[Backup, ...] = get_args(Backup)  # by ms_backup
_DEFAULT = -1


def backup_code(backup: str | None) -> int:
    """Return the C ABI's `ms_backup` value for a backup. None means the tag's policy.

    Raises:
        ConfigError: the backup is unknown.
    """
    if backup is None:
        return _DEFAULT
    return BACKUPS.index(checked_backup(backup))


def checked_backup(backup: object) -> Backup:
    """Check the name of a backup, and return it.

    Raises:
        ConfigError: the backup is unknown.
    """
    for known in BACKUPS:
        if backup == known:
            return known
    names = ", ".join(map(repr, BACKUPS))
    raise ConfigError(f"there is no backup {backup!r}; the backups are {names}")


def backup_of(code: int) -> Backup:
    """Return the name of the backup for a value of the C ABI's `ms_backup`."""
    return BACKUPS[code]


def policy_of(tag: str) -> Backup | None:
    """Return the backup policy of a tag, or None if no region has ever named the tag."""
    code = _C.tag_backup(tag)
    return None if code is None else BACKUPS[code]


def tag_totals(tags: Iterable[str], figure: str) -> dict[str, int]:
    """Return each tag's sum of the statistic `figure` over all devices; 0 for an unknown tag."""
    totals = dict.fromkeys(tags, 0)
    if not totals:
        return totals
    # One query for all tags, because each query reads all tags; selecting one tag's rows costs
    # little.
    for row in _C.stats(*totals) if len(totals) == 1 else _C.stats():
        if row["tag"] in totals:
            totals[str(row["tag"])] += int(row[figure])
    return totals


def check_tag(tag: object) -> str:
    """Return the tag if it is valid.

    Raises:
        ConfigError: the tag is not a string, is empty, contains a NUL character, or cannot be
            encoded as UTF-8.
    """
    if not isinstance(tag, str):
        raise ConfigError(f"a tag must be a string, such as 'weights', not {type(tag).__name__}")
    if not tag:
        raise ConfigError("a tag cannot be empty: use a name such as 'weights'")
    if "\0" in tag:
        raise ConfigError("a tag cannot contain a NUL character")
    try:
        tag.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"a tag must be text that UTF-8 can express: {error}") from None
    return tag


PART_MARK = "\x1f"
"""Reserved in tags: the separator between a tag and a part's backup (see `_transitions.parts`)."""


class PartName(str):
    """The name of a part of a tag. Only `_transitions.parts` creates such names."""

    __slots__ = ()


def check_new_tag(tag: object) -> str:
    """Return the tag if a program may create a region with it.

    Raises:
        ConfigError: the tag is invalid (see `check_tag`), or contains PART_MARK and is not a
            `PartName`.
    """
    checked = check_tag(tag)
    if PART_MARK in checked and not isinstance(checked, PartName):
        raise ConfigError(
            "a tag cannot contain U+001F, which is reserved for parts of tags: choose another name"
        )
    return checked


def _add_similar_tag(error: MemsaverError) -> None:
    """Add the known tag with the most similar name to an UnknownTagError."""
    if isinstance(error, UnknownTagError) and error.tag:
        with _C.SignalsDeferred():
            try:
                known = dict.fromkeys(str(row["tag"]) for row in _C.stats())
            except Exception:
                return  # the original error matters more
        error.message += did_you_mean(error.tag, known)


completions.append(_add_similar_tag)


def emit_warnings(stacklevel: int = 3) -> None:
    """Emit the library's pending warnings, with the caller's caller as their source."""
    while (text := _C.next_warning()) is not None:
        warnings.warn(text, MemsaverWarning, stacklevel=stacklevel)
    while _notes:
        try:
            text, category = _notes.popleft()
        except IndexError:  # another thread emitted it
            break
        warnings.warn(text, category, stacklevel=stacklevel)


def note(text: str, category: type[MemsaverWarning]) -> None:
    """Add a warning for the next `emit_warnings` to emit. Thread-safe."""
    _notes.append((text, category))


_notes: deque[tuple[str, type[MemsaverWarning]]] = deque()
