"""A fixture for the tests of examples/grpo."""

import pytest
from folder_modules import modules_in
from repository import ROOT


@pytest.fixture
def example(monkeypatch):
    """Import a module of examples/grpo for this test only."""
    yield from modules_in(monkeypatch, ROOT / "examples" / "grpo")
