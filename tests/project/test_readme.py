"""Tests that README.md's program runs, that its numbers match the result file, and that its names
exist."""

import json
import re

import pages
import pytest
from repository import ROOT

import memsaver
from memsaver.integrations.sglang import versions

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

README = (ROOT / "README.md").read_text()


@pytest.fixture
def drawn(benchmark_module):
    """Return the module that draws the picture."""
    return benchmark_module("readme_picture")


@pytest.fixture
def readme_table(benchmark_module):
    return benchmark_module("readme_table")


def test_the_measured_tables_are_the_result_files(readme_table):
    rows = readme_table.results.measured()
    for path, table in readme_table.pages(rows).items():
        assert readme_table.rewritten(path.read_text(), table) == path.read_text(), path


def test_the_picture_is_the_result_files(drawn):
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", drawn.PICTURE.read_text())
    assert {"memsaver", drawn.PEER} <= set(texts)  # the legend names both colours
    bars = drawn.bars(json.loads(drawn.RESULTS.read_text()))
    assert len(bars) == 5
    for words, ours, peers, ratio in bars:
        assert {words, drawn.label(ours, ratio), drawn.label(peers)} <= set(texts)


def test_one_sentence_describes_memsaver_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sentence = project["description"]
    assert f"# memsaver\n\n{sentence}.\n" in README
    assert f"# memsaver\n\n{sentence}.\n" in (ROOT / "docs" / "index.md").read_text()
    assert f'site_description: "{sentence}"\n' in (ROOT / "mkdocs.yml").read_text()
    assert memsaver.__doc__.startswith(f"{sentence}.\n")


def test_every_name_the_readme_uses_exists():
    names = set(re.findall(r"memsaver\.([a-z_]+)\(", README))
    assert names >= {"region", "pause", "resume", "explain"}
    for name in names:
        assert hasattr(memsaver, name), name


def test_the_first_program_prints_the_readmes_output(run_python):
    pytest.importorskip("torch")
    block, *others = pages.blocks_of(ROOT / "README.md")
    assert not others and block.output
    done = run_python(block.code, with_torch=True)
    assert done.stdout == block.output


def test_the_support_table_names_the_versions_that_were_run():
    rows = [line.split("|") for line in README.splitlines() if line.startswith("| [SGLang]")]
    ((_, _, gpus, simulated, *_),) = rows
    assert all(version in gpus for version in versions.TRIED)
    assert f"{versions.SIMULATED[0]} to {versions.SIMULATED[-1]}" in simulated


def test_every_error_the_readme_names_exists():
    rows = README.split("## If an error occurs")[1]
    names = set(re.findall(r"`(\w+Error)`", rows))
    assert len(names) >= 3 and names <= set(dir(memsaver))
