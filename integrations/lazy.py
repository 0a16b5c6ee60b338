"""Imports a package's names on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

__all__ = ["exports"]


def exports(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package.

    Args:
        package: the package's name.
        homes: the module of each name, relative to the package, such as ".session".
    """
    names = vars(sys.modules[package])

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(homes[name], package), name)
        names[name] = value  # later uses find the name without calling this function
        return value

    return find, lambda: sorted([*names, *homes])
