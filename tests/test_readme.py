"""README.md's figures are those of the result file."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import memsaver

ROOT = Path(__file__).parent.parent


@pytest.fixture
def readme_table():
    path = ROOT / "benchmarks" / "readme_table.py"
    spec = importlib.util.spec_from_file_location("readme_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_measured_table_is_the_result_files(readme_table):
    readme = (ROOT / "README.md").read_text()
    rows = json.loads(readme_table.RESULTS.read_text())
    assert readme_table.rewritten(readme, rows) == readme


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
