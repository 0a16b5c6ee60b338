"""Doing something when a module is imported, without importing it.

A platform plugin of SGLang runs in the middle of SGLang's own imports, where what the plugin wants
cannot be imported yet: it needs modules that are half made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["no_longer", "when_imported"]


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` once: now, if the module is there, else right after its import.

    On the thread that imports it, before anybody else sees the module. What `then` raises ends that
    import. An import that fails is waited out; the next one counts. Nothing happens where the
    module is being imported now: ask again later. Nor where it is awaited already.
    """
    module = sys.modules.get(name)
    if module is None:
        if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(name, then))
    elif not getattr(module.__spec__, "_initializing", False):
        then(module)


def no_longer(name: str) -> None:
    """Await the import of a module no more, if it was awaited."""
    for finder in list(sys.meta_path):
        if isinstance(finder, _Finder) and finder.name == name:
            sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds the one module by those behind it on the path, and leaves once that is imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that calls `then` when it has loaded."""
        if fullname != self.name:
            return None
        for finder in [finder for finder in sys.meta_path if finder is not self]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(Loader):
    """Loads by the module's own loader, which it leaves in its place."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader does; then what was asked for."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder.then(module)
