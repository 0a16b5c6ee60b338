"""Test how `make recipes` goes through the versions of an engine."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from repository import TESTS


def test_a_crash_with_one_version_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("recipes", TESTS / "recipes" / "__main__.py")
    recipes = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, recipes)
    spec.loader.exec_module(recipes)
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
