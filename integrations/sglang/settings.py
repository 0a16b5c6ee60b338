"""The environment variables of the SGLang plugin. Read at each use, so that children inherit them.

MEMSAVER_SGLANG: `0` turns the plugin off, so that SGLang does not use memsaver. Default `1`.
MEMSAVER_SGLANG_PRELOAD: `1` starts scheduler processes in preload mode, which a plain installation
    does not need; see `memsaver.preload`. Default `0`.

SGLang's own variables apply as well: `SGLANG_PLUGINS`, its list of the plugins to load, must
contain `memsaver` if it is set, and if `SGLANG_PLATFORM` selects another platform plugin, SGLang
does not load this one.
"""

from __future__ import annotations

import os

from memsaver.errors import ConfigError

__all__ = ["graphs_are_pausable", "is_on", "is_preloading"]

_VALUES = {
    "": None,
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def is_on() -> bool:
    """Return whether SGLang uses memsaver. Raises `ConfigError` if the value is not a flag."""
    return _flag("MEMSAVER_SGLANG", True)


def is_preloading() -> bool:
    """Return whether scheduler processes start in preload mode. Raises like `is_on`."""
    return _flag("MEMSAVER_SGLANG_PRELOAD", False)


def graphs_are_pausable() -> bool:
    """Return whether SGLang's own variable makes it capture graphs with the memory saver."""
    return os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").strip().lower() in ("1", "true")


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "").strip().lower()
    if text not in _VALUES:
        raise ConfigError(f"{name}={text!r} is not a flag: set it to 1 or 0")
    value = _VALUES[text]
    return default if value is None else value
