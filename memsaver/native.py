"""The native library as the rest of the package uses it: loaded, its warnings raised.

Loading it opens no driver and starts no CUDA context.
"""

from __future__ import annotations

import enum
import warnings
from collections import deque
from pathlib import Path

from memsaver.errors import ConfigError, MemsaverWarning, NotLoadedError, PerformanceWarning

try:
    from memsaver import _C
except ImportError as error:  # pragma: no cover - an installation that is broken
    raise NotLoadedError(
        f"memsaver's native library cannot be loaded ({error}); reinstall memsaver for this "
        "Python, or run `make build` in its source tree"
    ) from error

__all__ = [
    "LIBRARY_DIR",
    "PART_MARK",
    "_C",
    "Backup",
    "PartName",
    "State",
    "backup_code",
    "backup_of",
    "check_new_tag",
    "check_tag",
    "emit_warnings",
    "note",
]

LIBRARY_DIR = Path(_C.__file__).resolve().parent
"""Where libmemsaver.so and its companions lie."""


class State(str, enum.Enum):
    """The state of a tag. Compares equal to its name."""

    MAPPED = "mapped"
    SAVING = "saving"
    PAUSED = "paused"
    RESTORING = "restoring"

    __str__ = str.__str__


class Backup(str, enum.Enum):
    """Where the contents of a paused tag are kept. Compares equal to its name."""

    NONE = "none"
    HOST = "host"
    PAGEABLE = "pageable"
    DISK = "disk"

    __str__ = str.__str__


STATES = [State.MAPPED, State.SAVING, State.PAUSED, State.RESTORING]  # by ms_state
_BACKUPS = [Backup.NONE, Backup.HOST, Backup.PAGEABLE, Backup.DISK]  # by ms_backup
_DEFAULT = -1


def backup_code(backup: str | None) -> int:
    """The C ABI's number for a backup's name; None leaves the choice to the tag.

    Raises:
        ConfigError: there is no such backup.
    """
    if backup is None:
        return _DEFAULT
    try:
        return _BACKUPS.index(Backup(backup))
    except ValueError:
        names = ", ".join(repr(b.value) for b in _BACKUPS)
        raise ConfigError(f"there is no backup {backup!r}; the backups are {names}") from None


def backup_of(code: int) -> Backup:
    """The backup for a number of the C ABI."""
    return _BACKUPS[code]


def check_tag(tag: object) -> str:
    """The tag itself, if it can be one.

    Raises:
        ConfigError: it is no string, is empty, or contains a NUL character.
    """
    if not isinstance(tag, str):
        raise ConfigError(f"a tag is a string, such as 'weights', not {type(tag).__name__}")
    if not tag:
        raise ConfigError("a tag cannot be empty: give it a name such as 'weights'")
    if "\0" in tag:
        raise ConfigError("a tag cannot contain a NUL character")
    try:
        tag.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"a tag must be text that UTF-8 can express: {error}") from None
    return tag


PART_MARK = "\x1f"
"""Reserved in tags: the separator between a tag and the backup of a part (see `parts`)."""


class PartName(str):
    """The name of a part of a tag, which only `parts` makes."""

    __slots__ = ()


def check_new_tag(tag: object) -> str:
    """Return the tag if a region may be made of it.

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


def emit_warnings(stacklevel: int = 3) -> None:
    """Turn what the native library could tell nobody into `MemsaverWarning`s of our caller."""
    while (text := _C.next_warning()) is not None:
        warnings.warn(text, MemsaverWarning, stacklevel=stacklevel)
    while _notes:
        try:
            text = _notes.popleft()
        except IndexError:  # another thread took it
            break
        warnings.warn(text, PerformanceWarning, stacklevel=stacklevel)


def note(text: str) -> None:
    """A `PerformanceWarning` for the caller of the next `emit_warnings`. Any thread."""
    _notes.append(text)


_notes: deque[str] = deque()
