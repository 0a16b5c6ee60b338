"""Tests that the code in docs/ runs and prints the documented output, and that documented names
exist."""

import ast
import functools
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys

import pages
import pytest
from child_process import run_code
from repository import IMPORT_PATH, ROOT

import memsaver
from memsaver._runtime.native import LIBRARY_DIR
from memsaver._runtime.variables import KNOWN_VARIABLES
from memsaver.integrations.sglang import versions
from memsaver.integrations.vllm import versions as vllm_versions

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
SIMULATED = [path for path in PAGES if any(b.where == "sim" for b in pages.blocks_of(path))]
WITH_BLOCKS = [path for path in [*PAGES, ROOT / "README.md"] if pages.blocks_of(path)]

every_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


def text_of(path):
    """Return a page's text with the files that the page includes."""
    text = path.read_text()
    return re.sub(r'^--8<-- "([^":]*).*"$', lambda m: (ROOT / m[1]).read_text(), text, flags=re.M)


def sections(path):
    """Return the lines of each section by heading, without empty lines."""
    parts = re.split(r"^## (.*)\n", path.read_text(), flags=re.M)
    return {
        heading: [line for line in body.splitlines() if line]
        for heading, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def rows_of(text):
    """Return the cells of every row of every table, with backticks removed."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


# --- code -----------------------------------------------------------------------------------------


def run_pages(folder, *paths):
    """Run each page's blocks on the simulated driver; return their output or errors by page."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    environment |= {
        "MEMSAVER_DRIVER": "sim",
        "PYTHONPATH": os.pathsep.join([IMPORT_PATH, str(LIBRARY_DIR.parent)]),
    }
    code = f"import pages\npages.main('sim', *{[str(path) for path in paths]!r})"
    done = run_code(code, environment, folder, timeout=300, with_torch=True)
    rows = map(json.loads, done.stdout.splitlines())
    return {row["page"]: row for row in rows}


# What native libraries write to stdout is not taken for a page's output.
NATIVE_OUTPUT = "```python\nimport os\nos.write(1, b'[Gloo] Rank 0\\n')\nprint(1)\n```\n"


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "native.md").write_text(NATIVE_OUTPUT)
    found = run_pages(folder, *SIMULATED, folder / "native.md")
    assert found.pop(str(folder / "native.md"))["printed"] == ["1\n"]
    return found


def page(path):
    marks = [pytest.mark.preloads] if "preload_env(" in path.read_text() else []
    return pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.timeout(320)  # the first test runs all pages
@pytest.mark.parametrize("path", [page(path) for path in SIMULATED])
def test_code_prints_the_documented_output(printed, path):
    found = printed[str(path)]
    assert "error" not in found, found["error"]
    blocks = [block for block in pages.blocks_of(path) if block.where == "sim"]
    assert found["printed"] == [block.output or "" for block in blocks]


def test_the_tutorial_and_the_how_to_pages_are_run():
    run = {path.stem for path in SIMULATED}
    assert run >= {
        "index",
        "tutorial",
        "troubleshooting",
        "torch",
        "trainers",
        "several_gpus",
        "containers",
        "grpo",
    }


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=lambda path: path.stem)
def test_every_block_uses_existing_names(path):
    for block in pages.blocks_of(path):
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "memsaver":
                module = importlib.import_module(node.module)
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []
            if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("memsaver."):
                importlib.import_module("memsaver.distributed")
                named = re.match(r"memsaver(\.\w+)+", ast.unparse(node))[0]
                found = memsaver
                for name in named.split(".")[1:]:
                    assert hasattr(found, name), f"{path.name}:{block.line}: {named}"
                    found = getattr(found, name)


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=lambda path: path.stem)
def test_blocks_that_need_more_than_the_simulator_are_marked_visibly(path):
    for block in pages.blocks_of(path):
        above = path.read_text().splitlines()[: block.line - 2]  # the lines before the fence
        label = above[-2].strip() if block.where != "sim" else ""
        assert block.where == "sim" or re.fullmatch(r"\*\*Needs .+:\*\*", label), block


def test_every_block_of_python_is_seen():
    # A block with an unusual fence or comment would not be checked.
    for path in PAGES:
        fences = re.findall(r"^ *```(?:python|py|\{ *\.py)", path.read_text(), re.M)
        assert len(fences) == len(pages.blocks_of(path)), path


# --- documented names -----------------------------------------------------------------------------


@every_page
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", path.read_text()):
        file, _, heading = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.is_file() and found.is_relative_to(DOCS), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", text_of(found), re.M)
            anchors = {re.sub(r"[^\w\s-]", "", h).lower().replace(" ", "-") for h in headings}
            assert heading in anchors, target


def test_the_readmes_links_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).is_file(), target


@every_page
def test_variables_of_memsaver_exist(path):
    assert set(re.findall(VARIABLE, text_of(path))) <= variables_in_sources()


VARIABLE = r"\bMEMSAVER_[A-Z_]+"


@functools.cache
def variables_in_sources():
    sources = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    for folder in ("memsaver", "integrations", "build_support"):
        sources += (ROOT / folder).rglob("*.py")
    return set(re.findall(VARIABLE, "".join(path.read_text() for path in sources)))


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_engines_page_has_the_variables_of_its_plugin(name):
    prefix = f"MEMSAVER_{name.upper()}"
    wanted = {one for one in KNOWN_VARIABLES if one.startswith(prefix)}
    assert len(wanted) > 5 and wanted <= set(re.findall(VARIABLE, text_of(DOCS / f"{name}.md")))


def test_the_table_of_options_is_the_librarys():
    path = DOCS / "reference" / "options.md"
    source = (ROOT / "csrc" / "core" / "platform" / "options.h").read_text()
    options = set(re.findall(r'X\((\w+), k\w+, "(MEMSAVER_\w+)"', source))
    assert len(options) >= 7
    rows = [tuple(row[:2]) for row in rows_of(path.read_text()) if len(row) > 3]
    named = {row for row in rows if row[0].isidentifier() and row[1].startswith("MEMSAVER_")}
    assert named == options


def test_the_reference_has_everything_public():
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: memsaver\.(\w+)$", text, re.M))
    errors = set(importlib.import_module("memsaver.errors").__all__)
    assert set(memsaver.__all__) - errors <= shown
    for name in (
        "distributed",
        "integrations.lightrft",
        "integrations.rollout",
        "integrations.sglang",
        "integrations.trainer",
        "integrations.vllm",
    ):
        module = importlib.import_module(f"memsaver.{name}")
        page = DOCS / "reference" / f"{name.rpartition('.')[2]}.md"
        shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", page.read_text(), re.M))
        assert set(module.__all__) <= shown


@every_page
def test_pages_in_the_repository_show_no_directives(path):
    shown = re.sub(r"<!--.*?-->", "", path.read_text(), flags=re.S)
    assert not re.search(r"^\s*(?::::|--8<--)", shown, re.M)


def test_the_reference_can_be_read_without_the_site(monkeypatch):
    """A page with `:::` directives also contains a table of the documented names, which `make
    pages` generates.
    """
    monkeypatch.syspath_prepend(ROOT / "build_support")
    tables = importlib.import_module("reference_tables")
    found = [path for path in (DOCS / "reference").glob("*.md") if "\n::: " in path.read_text()]
    assert len(found) >= 8
    for path in found:
        text = path.read_text()
        assert tables.rewritten(text) == text, f"{path.name}: make pages"
        rows = {row[0]: row[1] for row in rows_of(tables.table(text)) if len(row) == 2}
        assert len(rows) > 5 and all(rows.values()), path


def test_the_page_of_the_command_line_is_generated(tmp_path):
    """The page is identical to the output of `make pages`."""
    page = tmp_path / "cli.md"
    recipe = re.search(
        r"typer (memsaver\.cli\.app utils docs .*) --output", (ROOT / "Makefile").read_text()
    )
    words = shlex.split(recipe[1])
    command = [sys.executable, "-m", "typer", *words, "--output", str(page)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    assert page.read_text() == (DOCS / "reference" / "cli.md").read_text(), "make pages"


def test_the_messages_of_the_troubleshooting_page_are_the_sources():
    page = sections(DOCS / "troubleshooting.md")
    said = [*page["memsaver's errors"], *page["Warnings"]]
    messages = [row[0] for row in rows_of("\n".join(said)) if not row[0].startswith("part of the ")]
    sources = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "memsaver").rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    text = re.sub(r'"\s*(?:MEMSAVER_VERSION\s*)?f?"', "", text)  # joins adjacent literals
    assert len(messages) > 10
    parts = [part.strip() for message in messages for part in message.split("...")]
    assert [part for part in parts if part not in text] == []


def test_the_measured_page_is_the_result_files(benchmark_module):
    module = benchmark_module("measured_page")
    assert module.page() == (DOCS / "measured.md").read_text(), "make pages"
    results = json.loads(module.RESULTS.read_text())
    assert all(
        f" {row['ratio']:.2f} |" in module.page() for row in results if row["ratio"] is not None
    )


def test_the_tests_that_the_design_names_exist():
    path, missing = "", []
    for named, test in re.findall(r"`([\w/]+\.py)?::(\w+)`", text_of(ROOT / "csrc" / "DESIGN.md")):
        path = named or path  # a name without a file follows another of the same file
        if f"def {test}(" not in text_of(ROOT / "tests" / path):
            missing.append(f"{path}::{test}")
    assert path and missing == []


# --- SGLang and its hosts -------------------------------------------------------------------------


def test_the_versions_of_vllm_are_those_of_the_plugin():
    first, last = vllm_versions.SIMULATED[0], vllm_versions.SIMULATED[-1]
    needed = " ".join(sections(DOCS / "vllm.md")["Install and enable"])
    assert f"vLLM {first[:-2]} to {last[:-2]}" in needed
    for version in (first, last):
        assert version in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("name", "known"),
    [("sglang", versions.SIMULATED), ("vllm", vllm_versions.SIMULATED)],
)
def test_the_tables_of_engines_versions_are_generated(monkeypatch, name, known):
    """The tables are identical to the output of `make pages`, and the plugins name the versions
    that passed.
    """
    monkeypatch.syspath_prepend(ROOT / "build_support")
    tables = importlib.import_module("version_tables")
    engine = tables.ENGINES[name]
    assert engine.rewritten(engine.page.read_text()) == engine.page.read_text(), "make pages"
    passed = {
        one.split(".post")[0] for one, result in engine.record.items() if tables.is_good(result)
    }
    failed = {one for one, result in engine.record.items() if not tables.is_good(result)}
    assert passed == set(known) and not failed
