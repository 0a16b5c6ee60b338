"""A fixture of the tests of examples/grpo."""

import pytest
from folder_modules import modules_in
from repository import ROOT


@pytest.fixture
def example(monkeypatch):
    """Import a module of examples/grpo, only for this test."""
    yield from modules_in(monkeypatch, ROOT / "examples" / "grpo")
