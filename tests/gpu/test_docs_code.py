"""Runs the code of README.md, and the code of docs/ that needs a GPU, on a real GPU."""

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


def printed_by(*words, folder):
    """Return the output of Python with these arguments; Python must succeed."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, *words],
        env={k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gpu
def test_the_readmes_program_prints_the_same_as_on_the_simulated_driver(tmp_path):
    block = pages.blocks_of(ROOT / "README.md")[0]
    assert printed_by("-c", block.code, folder=tmp_path) == block.output


@pytest.mark.gpu
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_prints_the_documented_output(path, tmp_path):
    found = json.loads(printed_by(str(SUPPORT / "pages.py"), "gpu", str(path), folder=tmp_path))
    assert "error" not in found, found["error"]
    blocks = [block for block in pages.blocks_of(path) if block.where == "gpu"]
    assert found["printed"] == [block.output or "" for block in blocks]
