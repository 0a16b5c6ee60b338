"""README.md's figures are those of the result file."""

import importlib
import json
import re
from pathlib import Path

import pytest

import memsaver

ROOT = Path(__file__).parent.parent


@pytest.fixture
def drawn(monkeypatch):
    """The program that draws the picture."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("readme_picture")


@pytest.fixture
def readme_table(drawn):
    return importlib.import_module("readme_table")


def test_the_measured_table_is_the_result_files(readme_table):
    readme = (ROOT / "README.md").read_text()
    rows = json.loads(readme_table.RESULTS.read_text())
    assert readme_table.rewritten(readme, rows) == readme


def test_the_picture_is_the_result_files(drawn):
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", drawn.PICTURE.read_text())
    bars = drawn.bars(json.loads(drawn.RESULTS.read_text()))
    assert len(bars) == 5
    for words, ours, peers, ratio in bars:
        assert {words, drawn.label(ours, ratio), drawn.label(peers)} <= set(texts)


def test_every_name_the_readme_uses_exists():
    readme = (ROOT / "README.md").read_text()
    names = set(re.findall(r"memsaver\.([a-z_]+)\(", readme))
    assert names >= {"region", "pause", "resume", "graph"}
    for name in names:
        assert hasattr(memsaver, name), name


def test_the_simulators_example_runs(run_python):
    readme = (ROOT / "README.md").read_text()
    example = next(b for b in re.findall(r"```python\n(.*?)```", readme, re.S) if "simulator" in b)
    done = run_python(example + "print(weights.sum().item())")
    assert done.returncode == 0, done.stderr
    needed, total = done.stdout.split("\n")[:2]
    assert int(needed.split()[0]) >= 4 << 20 and float(total) == 1024 * 1024
