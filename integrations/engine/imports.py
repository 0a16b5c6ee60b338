"""Callbacks that run after other code has imported a module.

SGLang loads its platform plugins during its own imports. The plugin cannot import the modules that
it needs at that time, because their dependencies are only partly imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["no_longer", "when_imported"]


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then(module)` once: now if the module is imported, otherwise just after its import.

    The callback runs on the importing thread, before other code can use the module. If the callback
    raises an exception, the import fails. After a failed import, the function waits for the next
    import of the module. The function does nothing if an earlier call is already waiting for this
    import. The function also does nothing if the module is being imported now; in that case, the
    caller must call the function again later.
    """
    module = sys.modules.get(name)
    if module is None:
        if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(name, then))
    elif not getattr(module.__spec__, "_initializing", False):
        then(module)


def no_longer(name: str) -> None:
    """Stop waiting for the import of a module."""
    for finder in list(sys.meta_path):
        if isinstance(finder, _Finder) and finder.name == name:
            sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds one module with the other finders, and removes itself after the import."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, with a loader that calls `then` after loading."""
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
    """Loads a module with its own loader, and restores that loader in the module's attributes."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Call the module's own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Call the module's own loader, and then the callback."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        self._finder.then(module)
