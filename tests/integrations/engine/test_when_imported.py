"""Tests callbacks that run when a module is imported."""

import importlib
import sys

import pytest

from memsaver.integrations.engine.imports import when_imported


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    """Write an importable module and return its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)

    def make(name: str, source: str = "value = 1\n") -> str:
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return name

    yield make
    assert sys.meta_path == before, "a finder was left"
    for name in [path.stem for path in tmp_path.glob("*.py")]:
        sys.modules.pop(name, None)


@pytest.mark.each_python
def test_when_a_module_is_imported(make_module):
    name, seen = make_module("awaited_module"), []
    when_imported(name, lambda module: seen.append(module.value))
    when_imported(name, lambda module: seen.append("twice"))
    assert seen == [] and name not in sys.modules
    importlib.import_module("this")  # another module
    module = importlib.import_module(name)
    assert seen == [1]
    importlib.reload(module)
    assert seen == [1]
    # It is identical to a module that was imported without the finder.
    assert type(module.__spec__.loader).__name__ == "SourceFileLoader"
    assert module.__loader__ is module.__spec__.loader
    when_imported(name, lambda module: seen.append(2))
    assert seen == [1, 2]


@pytest.mark.each_python
def test_when_a_module_fails_at_first(make_module):
    name, seen = make_module("failing_module", "raise ImportError('not yet')\n"), []
    when_imported(name, seen.append)
    for _ in range(2):
        with pytest.raises(ImportError, match="not yet"):
            importlib.import_module(name)
    assert seen == []
    make_module("failing_module", "value = 1  # now it does\n")
    module = importlib.import_module(name)
    assert seen == [module]


@pytest.mark.each_python
def test_when_a_module_is_being_imported(make_module):
    """The module is ignored because the end of its import cannot be observed."""
    when, seen = "memsaver.integrations.engine.imports", []
    name = make_module(
        "half_module",
        f"""
from {when} import when_imported
import builtins
when_imported(__name__, builtins.half_module_seen.append)
        """,
    )
    sys.modules["builtins"].half_module_seen = seen
    try:
        module = importlib.import_module(name)
    finally:
        del sys.modules["builtins"].half_module_seen
    assert seen == []
    when_imported(name, seen.append)
    assert seen == [module]


def test_when_a_module_does_not_exist(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    when_imported("no_such_module_anywhere", pytest.fail)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")
