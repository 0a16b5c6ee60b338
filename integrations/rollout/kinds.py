"""The kinds of engines: the modules of `memsaver.integrations` that start them and call them.

The package of a kind has two modules: `launch`, with `sizes_of`, `place` and `launch`, and
`launch_node` if its engines can be on several hosts; and `backend`, with `backend_of`. A kind's
package is imported only if its engine is used.
"""

from __future__ import annotations

import importlib
from typing import Any

from memsaver.errors import ConfigError

__all__ = ["kind_of", "module_of"]

_KINDS = ("sglang", "vllm")


def kind_of(engine: Any, given: str | None = None) -> str:
    """Return the kind of an engine.

    Args:
        engine: an engine of this process, whose class names its kind, or anything else.
        given: the kind that the caller passes; None means the engine's own kind, or "sglang".

    Raises:
        ConfigError: the kind is unknown.
    """
    if given is None:
        package = type(engine).__module__.partition(".")[0]
        return package if package in _KINDS else _KINDS[0]
    if given not in _KINDS:
        raise ConfigError(f"kind must be one of {', '.join(_KINDS)}, not {given!r}")
    return given


def module_of(kind: str, name: str) -> Any:
    """Return the module "launch" or "backend" of a kind."""
    return importlib.import_module(f"..{kind}.{name}", __package__)
