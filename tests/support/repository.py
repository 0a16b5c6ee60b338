"""The paths of the repository and of the folders from which its tests import modules."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
GPU_SUPPORT = TESTS / "gpu" / "support"  # programs and helpers of the tests on a GPU

# PYTHONPATH for processes that import the tests' modules: programs in tests/ such as faults and
# model, and helpers in tests/support. The Makefile and pyproject.toml name the same two folders.
IMPORT_PATH = os.pathsep.join([str(TESTS), str(SUPPORT)])
