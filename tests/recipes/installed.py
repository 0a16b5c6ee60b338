"""Which frameworks are installed here."""

from __future__ import annotations

import importlib.util

import pytest

# SGLang with plugins, which is what finds memsaver: 0.5.11 or newer.
SGLANG = "sglang.srt.plugins"


def is_there(module: str) -> bool:
    """Whether a module can be found; its parents are imported for it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def needs(module: str, why: str) -> None:
    """Skip where a module is not installed."""
    if not is_there(module):
        pytest.skip(f"{module} is not installed: {why}")
