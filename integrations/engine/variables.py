"""The environment variables of an engine's plugin. Child processes inherit them.

Flags are read at each use, so changes to `os.environ` take effect. An engine's policy for requests
is read once, when the engine starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, get_args

from memsaver._runtime.native import BACKUPS, Backup
from memsaver.errors import ConfigError

from .fields import is_number, is_whole
from .policies import Policy, WhenAsleep

__all__ = ["EnginePolicies", "backup", "flag"]

_MOST_SECONDS = 86400.0
_VALUES = {
    "": None,
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_ATTRIBUTE = "_memsaver_policy"  # an attribute of an engine, or of an object in its processes


def flag(name: str, default: bool) -> bool:
    """Return the value of a flag. Raises `ConfigError` if the value is invalid."""
    text = os.environ.get(name, "").strip().lower()
    if text not in _VALUES:
        raise ConfigError(f"{name}={text!r} is not a flag: set it to 1 or 0")
    value = _VALUES[text]
    return default if value is None else value


def backup(name: str) -> Backup:
    """Return the backing store that a variable selects; "host" if the variable is not set.

    Raises:
        ConfigError: the value is unknown.
    """
    text = os.environ.get(name, "").strip().lower() or "host"
    for place in BACKUPS:
        if text == place != "none":
            return place
    raise ConfigError(f"{name}={text!r} is not a place for backups: see memsaver.region")


class EnginePolicies:
    """The policies of one kind of engine.

    Args:
        prefix: the name of the variable that turns the engine's plugin off, and the prefix of the
            variables `prefix`_ASLEEP, _ASLEEP_WAIT, _ASLEEP_REQUESTS and _SLEEP_AFTER.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def new(self) -> Policy:
        """Return the policy of a new engine in this process. Raises `ConfigError`."""
        return _policy(self._prefix)

    def of(self, owner: Any) -> Policy:
        """Return the policy of an engine, or of an object in one of its processes.

        The first call for an object reads the variables. This call is made when the object is
        created.

        Raises:
            ConfigError: a variable is invalid, or `sleep_after` is set without "wake".
        """
        found = vars(owner).get(_ATTRIBUTE)
        if found is None:
            found = self.new()
            setattr(owner, _ATTRIBUTE, found)
        return found  # type: ignore[no-any-return]

    def fix(self, original: Callable[..., None], owner: Any, *args: Any, **named: Any) -> None:
        """Wrap a constructor so that it reads the object's policy before the variables can change.

        Raises:
            ConfigError: see `of`.
        """
        self.of(owner)
        original(owner, *args, **named)

    def variables(self, arguments: Mapping[str, Any]) -> dict[str, str]:
        """Return the variables for an engine's processes; see `Launcher.policy_variables`."""
        _policy(self._prefix, arguments)
        given = {
            option: arguments[option] for option in _OPTIONS if arguments.get(option) is not None
        }
        if given and not flag(self._prefix, True):
            raise ConfigError(
                f"{', '.join(given)} cannot take effect, because {self._prefix} turns memsaver's "
                f"plugin off: unset {self._prefix}, or omit these arguments"
            )
        return {_variable(self._prefix, option): str(value) for option, value in given.items()}


def _policy(prefix: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> Policy:
    """Return the policy that arguments and environment variables define.

    Args:
        prefix: see `EnginePolicies`.
        arguments: the values, keyed by the variables' names in lower case without the prefix. An
            argument other than None overrides its variable.

    Raises:
        ConfigError: a value is invalid, or `sleep_after` is set without "wake".
    """
    names: dict[str, str] = {}  # the arguments and variables in effect
    values: dict[str, Any] = {}
    for option, (field, parse, is_valid, rule) in _OPTIONS.items():
        given = value = arguments.get(option)
        names[field] = option if given is not None else _variable(prefix, option)
        if given is None:
            given = os.environ.get(names[field], "").strip().lower()
            if not given:
                continue
            value = parse(given)
        if not is_valid(value):
            raise ConfigError(f"{names[field]}={given!r} {rule}")
        values[field] = value
    found = Policy(**values)
    if found.sleep_after and found.when_asleep != "wake":
        raise ConfigError(
            f"{names['sleep_after']} needs {names['when_asleep']}=wake, because otherwise no "
            "request would wake the engine after it has released its memory"
        )
    return found


def _variable(prefix: str, option: str) -> str:
    return f"{prefix}_{option.upper()}"


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _is_policy(value: object) -> bool:
    return isinstance(value, str) and value in get_args(WhenAsleep)


def _are_seconds(value: Any) -> bool:
    return is_number(value) and 0 <= value <= _MOST_SECONDS


def _is_count(value: object) -> bool:
    return is_whole(value) and value > 0


# By option: the `Policy` field, the parser of a variable's text, and the check with its message.
_SECONDS = (_number, _are_seconds, "is not a number of seconds between 0 and one day")
_OPTIONS: dict[str, tuple[str, Callable[[str], Any], Callable[[Any], bool], str]] = {
    "asleep": ("when_asleep", str, _is_policy, f"must be one of {', '.join(get_args(WhenAsleep))}"),
    "asleep_wait": ("wait_seconds", *_SECONDS),
    "asleep_requests": ("most_held", _whole, _is_count, "is not a positive whole number"),
    "sleep_after": ("sleep_after", *_SECONDS),
}
