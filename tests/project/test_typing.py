"""Tests the package's types and signatures."""

import ast
import inspect
import os
import pickle
import subprocess
import sys
import typing

import pytest
from repository import ROOT, TESTS

import memsaver

pytestmark = pytest.mark.each_python

PROGRAM = TESTS / "fixtures" / "user" / "program.py"
MISTAKES = PROGRAM.with_name("mistakes.py")


def test_a_users_program_uses_everything_public():
    tree = ast.parse(PROGRAM.read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    used |= {alias.name for node in imported for alias in node.names}
    assert set(memsaver.__all__) - used == set()


def test_the_package_has_only_public_names(run_python):
    """All other names begin with an underscore, even after every module has been imported."""
    done = run_python(
        """
        import importlib, pkgutil
        import memsaver, memsaver.integrations

        for module in pkgutil.iter_modules(memsaver.__path__, "memsaver."):
            if not module.name.startswith("memsaver.lib") and module.name != "memsaver.__main__":
                importlib.import_module(module.name)
        names = {name for name in dir(memsaver) if not name.startswith("_")}
        print(*sorted(names - set(memsaver.__all__)))
        """
    )
    modules = "cli distributed errors integrations metrics simulator traces"
    assert done.stdout.split() == modules.split()


LITERALS = [name for name in memsaver.__all__ if typing.get_args(getattr(memsaver, name))]


@pytest.mark.parametrize("name", sorted({*memsaver.__all__} - {*LITERALS}))
def test_public_names_are_pickled_and_read_by_public_modules(name):
    value = getattr(memsaver, name)
    assert value.__module__ in {"memsaver", "memsaver.errors"}
    assert pickle.loads(pickle.dumps(value)) is value
    if inspect.isclass(value) and value.__module__ == "memsaver":
        typing.get_type_hints(value)  # names are resolved in that module


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
def test_mypy_strict_accepts_a_users_program_and_finds_typical_mistakes(tmp_path):
    # Without this project's settings, except for torch, which takes mypy half a minute.
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n"
        "[mypy-pynvml.*]\nignore_missing_imports = True\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(settings)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache"), str(PROGRAM), str(MISTAKES)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    reported = {
        line.partition(": error:")[0] for line in done.stdout.splitlines() if ": error:" in line
    }
    marked = {
        f"{MISTAKES}:{number}"
        for number, line in enumerate(MISTAKES.read_text().splitlines(), 1)
        if line.endswith("# mistake")
    }
    assert len(marked) >= 10 and reported == marked, done.stdout + done.stderr


@pytest.mark.long
def test_tensors_have_tensor_types(tmp_path):
    # A stub of torch with only the names in these signatures, which mypy reads.
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
