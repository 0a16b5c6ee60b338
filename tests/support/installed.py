"""Checks which frameworks are installed on this machine."""

from __future__ import annotations

import importlib.util

import absent_packages
import pytest

# SGLang with the plugin system through which it finds memsaver: 0.5.11 or newer.
SGLANG = "sglang.srt.plugins"


def is_there(module: str) -> bool:
    """Return whether a module can be found; the search imports the module's parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def needs(module: str, why: str) -> None:
    """Skip the test if a module is not installed."""
    if not is_there(module):
        pytest.skip(f"{module} is not installed: {why}")


def needs_sglang() -> None:
    """Skip the test if SGLang has no plugins or is absent; make SGLang importable without a GPU."""
    if importlib.util.find_spec("sglang") is not None:
        absent_packages.install()
    needs(SGLANG, "it needs SGLang 0.5.11 or newer (make recipes)")
