"""Tests how `make recipes` processes the versions of an engine."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from repository import TESTS

# Files for frameworks that `make recipes` does not install.
FRAMEWORKS = ("lightrft", "slime", "trl", "verl", "verl_trainer", "xtuner")


@pytest.fixture
def recipes(monkeypatch):
    spec = importlib.util.spec_from_file_location("recipes", TESTS / "recipes" / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_every_file_is_run_with_one_engine(recipes):
    listed = [file for one in recipes.ENGINES.values() for file in (*one.files, *one.children)]
    names = {f"test_recipe_{name}.py" for name in (*listed, *FRAMEWORKS)}
    assert names == {path.name for path in (TESTS / "recipes").glob("test_recipe_*.py")}
    assert len(names) == len(listed) + len(FRAMEWORKS)


def test_a_crash_with_one_version_does_not_stop_the_next(recipes, tmp_path, monkeypatch, capsys):
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\nexit 139\n")
    crashing.chmod(0o755)
    monkeypatch.setattr(recipes, "installed", lambda *_, **__: tmp_path)
    monkeypatch.setattr(sys, "executable", str(crashing))
    monkeypatch.setattr(sys, "argv", ["recipes", "--engine", "sglang", "0.5.11", "0.5.23"])
    with pytest.raises(SystemExit, match="could not run"):
        recipes.main()
    printed = capsys.readouterr().out
    for version in ("0.5.11", "0.5.23"):
        assert f"SGLang {version}: pytest ended with status 139" in printed
