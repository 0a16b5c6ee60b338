"""Run the code in README.md, and the code in docs/ that needs a GPU, on a real GPU."""

import json
import os
import subprocess
import sys

import pages
import pytest
from repository import ROOT, SUPPORT

PAGES = [
    path
    for path in sorted((ROOT / "docs").glob("**/*.md"))
    if any(block.where == "gpu" for block in pages.blocks_of(path))
]


@pytest.mark.gpu
def test_the_readmes_program_prints_the_same_as_on_the_simulated_driver(tmp_path):
    pytest.importorskip("torch")
    block = pages.blocks_of(ROOT / "README.md")[0]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    done = subprocess.run(
        [sys.executable, "-c", block.code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == block.output


@pytest.mark.gpu
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_prints_the_documented_output(path, tmp_path):
    pytest.importorskip("torch")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "pages.py"), "gpu", str(path)],
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
