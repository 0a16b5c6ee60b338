"""The code in docs/ that needs a GPU runs on one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pages
import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    path
    for path in sorted((ROOT / "docs").glob("**/*.md"))
    if any(block.where == "gpu" for block in pages.blocks_of(path))
]


@pytest.mark.gpu
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_prints_what_the_page_says(path, tmp_path):
    pytest.importorskip("torch")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "pages.py"), "gpu", str(path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "error" not in found, found["error"]
    blocks = [block for block in pages.blocks_of(path) if block.where == "gpu"]
    assert found["printed"] == [block.output or "" for block in blocks]
