"""The kinds of engines, and the packages of `memsaver.integrations` that start and call them.

Each kind's package has two modules: `launch` implements `Launcher`, or `NodeLauncher` if an engine
can span several hosts, and `backend` implements `Connector`. A kind's package is imported only when
an engine of that kind is used.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from memsaver.errors import ConfigError

from ..engine.launcher import Connector, Launcher, NodeLauncher

__all__ = ["connector_of", "launcher_of", "node_launcher_of"]

_KINDS = ("sglang", "vllm")


def launcher_of(kind: str) -> Launcher:
    """Return the module that starts engines of a kind. Raises `ConfigError` for an unknown kind."""
    return cast("Launcher", _module(kind, "launch"))


def node_launcher_of(kind: str) -> NodeLauncher:
    """Return the module that starts the parts of an engine on other hosts."""
    return cast("NodeLauncher", _module(kind, "launch"))


def connector_of(engine: Any, kind: str | None = None) -> Connector:
    """Return the module that calls an engine.

    Args:
        engine: an engine object in this process, whose class or base class determines the kind, or
            any other value.
        kind: the kind passed by the caller; None selects the kind of the engine's class, or
            "sglang" if the class is unknown.

    Raises:
        ConfigError: the kind is unknown.
    """
    if kind is None:
        packages = (cls.__module__.partition(".")[0] for cls in type(engine).__mro__)
        kind = next((package for package in packages if package in _KINDS), _KINDS[0])
    return cast("Connector", _module(kind, "backend"))


def _module(kind: str, name: str) -> Any:
    if kind not in _KINDS:
        raise ConfigError(f"kind must be one of {', '.join(_KINDS)}, not {kind!r}")
    return importlib.import_module(f"..{kind}.{name}", __package__)
