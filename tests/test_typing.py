"""The package as a type checker and a reader of signatures see it."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import memsaver

ROOT = Path(__file__).parent.parent
PROGRAM = ROOT / "tests" / "user" / "program.py"


def test_a_users_program_uses_everything_public():
    tree = ast.parse(PROGRAM.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    used |= {alias.name for node in imported for alias in node.names}
    assert set(memsaver.__all__) - used == set()


@pytest.mark.preloads
def test_a_users_program_runs(run_python):
    done = run_python(f"import runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')")
    assert done.stdout.splitlines() == [
        str(len("no such tag")),
        "paused 3 None",
        "False True ['kv_cache', 'weights'] ['LD_PRELOAD', 'MEMSAVER_BACKUP', 'MEMSAVER_TAG']",
    ]
    assert done.stderr == ""


@pytest.mark.long
def test_a_users_program_is_clean_under_mypy_strict(tmp_path):
    # Nothing of this project's settings, but for torch, which takes mypy half a minute.
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"
        "[mypy-pynvml.*]\nignore_missing_imports = True\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(settings)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), str(PROGRAM)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_what_is_a_tensor_is_typed_as_one(tmp_path):
    # A torch that says no more than what these have to do with it, and is read.
    (tmp_path / "torch" / "cuda").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.pyi").write_text("class Tensor: ...\nfrom torch import cuda\n")
    (tmp_path / "torch" / "cuda" / "__init__.pyi").write_text("class MemPool: ...\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\nimport memsaver\nfrom memsaver import simulator\n"
        "def saved(x: torch.Tensor) -> torch.Tensor:\n    return memsaver.backup_view(x)\n"
        "def pool() -> torch.cuda.MemPool:\n    return memsaver.torch_pool('x')\n"
        "def one() -> torch.Tensor:\n    return simulator.empty(3)\n"
    )
    (tmp_path / "mypy.ini").write_text("[mypy]\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", str(program)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_says_that_it_is_typed():
    folder = Path(memsaver.__file__).parent
    assert (folder / "py.typed").is_file() and (folder / "_C.pyi").is_file()
