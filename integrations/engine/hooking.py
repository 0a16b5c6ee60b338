"""Installs hooks around the methods of an engine's classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

__all__ = ["INSTALLED", "Hooks", "around", "install", "modules_of", "wrapped"]

Hooks = Mapping[str, tuple[str, Callable[..., Any]]]
"""The kind and the hook for each method, keyed by "module.Class.method".

AROUND hooks are called with the original method and its arguments, AFTER hooks with the method's
result and its arguments, and REPLACE hooks with its arguments.
"""

INSTALLED = "_memsaver_hooks"  # an attribute of a class, or of a function hooked individually


def modules_of(*all_hooks: Hooks) -> tuple[str, ...]:
    """Return the names of the modules that contain the methods to hook."""
    targets = (target for hooks in all_hooks for target in hooks)
    return tuple(dict.fromkeys(target.rsplit(".", 2)[0] for target in targets))


def install(module: ModuleType, hooks: Hooks, optional: Hooks) -> set[str]:
    """Install the hooks for an imported module's methods. This function is idempotent.

    Returns:
        The methods of `optional` that the module lacks.

    Raises:
        AttributeError: the module lacks a method of `hooks`.
    """
    missing = set()
    for target, (kind, hook) in {**hooks, **optional}.items():
        where, owner_name, name = target.rsplit(".", 2)
        if where != module.__name__:
            continue
        owner = getattr(module, owner_name, None)
        if target in optional and (owner is None or not hasattr(owner, name)):
            missing.add(target)
            continue
        owner = getattr(module, owner_name)
        done = vars(owner).get(INSTALLED, frozenset())
        if name not in done:
            setattr(owner, name, wrapped(kind, getattr(owner, name), hook))
            setattr(owner, INSTALLED, done | {name})
    return missing


def around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Install an AROUND hook for a function of a class or a module. This function is idempotent.

    Raises:
        AttributeError: the owner lacks the function.
    """
    original = getattr(owner, name)
    if not hasattr(original, INSTALLED):
        call = wrapped("AROUND", original, hook)
        vars(call)[INSTALLED] = True
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(call) if is_static else call)


def wrapped(kind: str, original: Callable[..., Any], hook: Callable[..., Any]) -> Any:
    """Return the hooked method.

    Arguments that the caller passes by keyword are passed to the hook by position, except
    keyword-only arguments.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        args, kwargs = bound.args, bound.kwargs
        if kind == "AROUND":
            return hook(original, *args, **kwargs)
        if kind == "AFTER":
            return hook(original(*args, **kwargs), *args, **kwargs)
        return hook(*args, **kwargs)

    return call
