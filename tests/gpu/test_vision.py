"""Tests prompts with images on a real SGLang engine with a small vision model.

    pytest -m "gpu and sglang" tests/gpu/test_vision.py

The tests require torchvision and Pillow, as SGLang's image processors do.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from repository import GPU_SUPPORT
from test_rollout import SECONDS, go_through

CHILD = GPU_SUPPORT / "vision_child.py"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sglang,
    pytest.mark.timeout(SECONDS + 60),
]


@pytest.mark.parametrize("scene", ["tokens", "texts"])
def test_prompts_with_images(scene: str, tmp_path: Path) -> None:
    go_through(scene, 1, tmp_path, CHILD)
