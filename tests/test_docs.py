"""docs/ keeps to what is there: names, variables, versions, links; and to its length."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from memsaver.integrations.sglang import versions
from memsaver.integrations.sglang.protocol import RELEASE_ORDER

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
SGLANG = ROOT / "docs" / "sglang.md"


def sections(path):
    """The body of each section, by its heading, without empty lines."""
    parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.M)
    return {
        heading: [line for line in body.splitlines() if line]
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_blocks_import_what_exists(path):
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.S):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "memsaver":
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
        file, _, heading = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.is_file(), target
        headings = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
        assert not heading or heading in {h.lower().replace(" ", "-") for h in headings}, target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_variables_of_memsaver_exist(path):
    sources = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    sources += [*(ROOT / "memsaver").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    known = set(re.findall(r"\bMEMSAVER_[A-Z_]+", "".join(p.read_text() for p in sources)))
    named = set(re.findall(r"\bMEMSAVER_[A-Z_]+", path.read_text()))
    assert named <= known


@pytest.mark.parametrize("framework", ["SGLang", "verl", "slime", "miles"])
def test_what_to_install_and_set_takes_ten_lines(framework):
    lines = sections(SGLANG)[framework]
    assert 0 < len(lines) <= 10


def test_the_versions_are_those_of_the_plugin():
    rows = [row.split("|") for row in sections(SGLANG)["Versions"] if row.startswith("| SGLang")]
    by_meaning = {row[3].strip(): row[2] for row in rows}
    for version in versions.TRIED:
        assert version in by_meaning["run"]
    for version in versions.READ:
        assert version in by_meaning["its source was read"]
    since = versions.PLUGINS_SINCE
    assert f"SGLang {since} or newer" in " ".join(sections(SGLANG)["SGLang"])
    assert sum(f"from {since}" in row[2] or f"before {since}" in row[2] for row in rows) == 2


def test_the_tags_are_those_of_the_protocol():
    text = SGLANG.read_text()
    assert all(f"`{tag}`" in text for tag in RELEASE_ORDER)
