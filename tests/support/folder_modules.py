"""Imports modules from a folder that is not a package, for the duration of one test."""

import importlib
import sys


def modules_in(monkeypatch, folder, *others):
    """Yield `import_module` with the folder on the search path; unload its modules afterwards."""
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = str(getattr(sys.modules[name], "__file__", ""))
        if file.startswith((str(folder), *map(str, others))):
            del sys.modules[name]
