"""The environment variables of an engine's plugin. Child processes inherit them.

They are read at each use, so changes to `os.environ` take effect.
"""

from __future__ import annotations

import math
import os
from typing import cast, get_args

from memsaver.errors import ConfigError

from .policies import Policy, WhenAsleep

__all__ = ["flag", "policy"]

_MOST_SECONDS = 86400.0
_VALUES = {
    "": None,
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def flag(name: str, default: bool) -> bool:
    """Return the value of a flag. Raises `ConfigError` if it is not a flag."""
    text = os.environ.get(name, "").strip().lower()
    if text not in _VALUES:
        raise ConfigError(f"{name}={text!r} is not a flag: set it to 1 or 0")
    value = _VALUES[text]
    return default if value is None else value


def policy(prefix: str) -> Policy:
    """Return the policy that environment variables with a prefix define.

    These are `prefix`_ASLEEP, _ASLEEP_WAIT, _ASLEEP_REQUESTS and _SLEEP_AFTER.

    Raises:
        ConfigError: a variable is invalid, or no request would wake an engine that fell asleep.
    """
    asleep, after = f"{prefix}_ASLEEP", f"{prefix}_SLEEP_AFTER"
    text = os.environ.get(asleep, "").strip().lower() or "refuse"
    if text not in get_args(WhenAsleep):
        raise ConfigError(f"{asleep}={text!r} must be one of {', '.join(get_args(WhenAsleep))}")
    when = cast(WhenAsleep, text)
    found = Policy(
        when,
        _seconds(f"{asleep}_WAIT", 60.0),
        _seconds(after, 0.0),
        _number(f"{asleep}_REQUESTS", Policy.most_held),
    )
    if found.sleep_after and when != "wake":
        raise ConfigError(
            f"{after} needs {asleep}=wake, because otherwise no request would wake the engine "
            "after it has released its memory"
        )
    return found


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        raise ConfigError(f"{name}={text!r} is not a positive whole number")
    return int(text)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MOST_SECONDS:
        raise ConfigError(f"{name}={text!r} is not a number of seconds between 0 and one day")
    return value
