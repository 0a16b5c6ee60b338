"""Fakes of packages that a module imports but a test does not need."""

from __future__ import annotations

import importlib
import inspect
import sys
import types


class _Anything:
    """An attribute of a fake package.

    As a decorator, the attribute returns its argument; any other call returns the attribute itself.
    """

    def __init__(self, keeps_apps: bool) -> None:
        self._keeps_apps = keeps_apps

    def __call__(self, *args, **named):
        if len(args) == 1 and not named:
            (one,) = args
            if inspect.isroutine(one) or inspect.isclass(one):
                return one
            if self._keeps_apps and callable(one):
                return one
        return self

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __mro_entries__(self, bases):
        return ()


class _Package(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(keeps_apps="prometheus" not in self.__name__)


def fake_missing(work, patch):
    """Return the result of `work`; fakes replace the packages that its imports cannot find."""
    while True:
        try:
            return work()
        except ModuleNotFoundError as error:
            fake(error, patch)


def fake(error: ModuleNotFoundError, patch) -> None:
    """Install a fake of the missing package; re-raise the error if the package is part of vLLM."""
    if str(error.name).startswith("vllm"):
        raise error
    patch.setitem(sys.modules, error.name, _Package(error.name))


def imported(name: str, patch):
    """Import and return a module, or return None if the module does not exist."""
    try:
        return fake_missing(lambda: importlib.import_module(name), patch)
    except ModuleNotFoundError:
        return None
