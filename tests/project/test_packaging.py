"""Tests the published packages: a single version, the sdist, wheels, linters and workflows."""

import fcntl
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from c_library import needs_a_c_library_before_2_38
from elftools.elf.elffile import ELFFile
from repository import ROOT, TESTS

import memsaver

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

DROP_IN = ROOT / "integrations" / "torch_memory_saver"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = dict(pin.split("==") for pin in [*EXTRAS["lint"], *EXTRAS["types"]] if "==" in pin)


# --- versions -------------------------------------------------------------------------------------


def test_every_part_has_the_projects_version():
    assert PROJECT["version"] == metadata.version("memsaver")
    assert PROJECT["version"] == memsaver.__version__  # compiled into the core


def test_no_other_file_contains_the_version():
    kinds = ("*.py", "*.pyi", "*.h", "*.cpp", "*.c", "*.toml", "*.yml")
    folders = ("memsaver", "integrations", "csrc", "build_support", ".github")
    paths = [p for folder in folders for kind in kinds for p in (ROOT / folder).rglob(kind)]
    paths += [ROOT / "mkdocs.yml", ROOT / "setup.py", ROOT / "Makefile"]
    word = re.compile(rf"(?<![\d.]){re.escape(PROJECT['version'])}(?![\d.])")
    assert len(paths) > 100
    assert [path for path in paths if word.search(path.read_text())] == []


# --- linters and workflows ------------------------------------------------------------------------


def hooks():
    """Return each repository's revision and hooks in the pre-commit configuration."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    found = {}
    for part in text.split("- repo: ")[1:]:
        name = part.splitlines()[0].rsplit("/", 1)[1]
        revision = re.search(r"^ +rev: (\S+)$", part, re.M)[1]
        found[name] = (revision.removeprefix("v"), re.findall(r"- id: (\S+)", part))
    return found


def test_pre_commit_has_the_linters_of_make_lint_in_the_same_versions():
    repositories = {
        "ruff-pre-commit": "ruff",
        "mirrors-clang-format": "clang-format",
        "mirrors-mypy": "mypy",
        "check-jsonschema": "check-jsonschema",
    }
    assert {repositories[name]: hooks()[name][0] for name in hooks()} == PINNED
    assert f"ruff=={PINNED['ruff']}" in EXTRAS["docs"]
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    for name, command in (
        ("ruff-check", "ruff check"),
        ("ruff-format", "ruff format"),
        ("mypy", "mypy"),
        ("clang-format", "clang-format"),
        ("check-github-workflows", "check-jsonschema"),
    ):
        assert any(name in ids for _, ids in hooks().values())
        assert f"$(BIN)/{command} " in lint


def test_pre_commits_mypy_has_memsavers_requirements():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert all(f'"{requirement}"' in text for requirement in PROJECT["dependencies"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_and_nothing_else(path):
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    commands = re.findall(r"\brun: (.*)$", path.read_text(), re.M)
    assert commands
    for command in commands:
        target = re.fullmatch(r'make ([a-z-]+)(?: ARGS="[^"]*")?', command)
        assert target and target[1] in targets


def test_pythons_are_the_same_everywhere():
    named = {
        text.rsplit(" ", 1)[1]
        for text in PROJECT["classifiers"]
        if re.search(r"Python :: 3\.\d+$", text)
    }
    test = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    wheels = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    assert set(re.findall(r'"(3\.\d+)"', test.split("long:")[0])) == named
    built = re.findall(r"/opt/python/cp3(\d+)-cp3\1/bin/python", wheels)
    assert {f"3.{minor}" for minor in built} == named


@pytest.mark.parametrize("holds", ["a package", "a file", "nothing", "pip", "linked"])
def test_make_replaces_no_environment_that_it_did_not_create(tmp_path, monkeypatch, holds):
    monkeypatch.syspath_prepend(ROOT / "build_support")
    make_venv = importlib.import_module("make_venv")
    target = tmp_path
    if holds == "linked":
        target = tmp_path / ".venv"
        target.symlink_to(tmp_path)
        (tmp_path / "test-extra").touch()
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    if holds in ("a package", "pip"):
        name = "pip" if holds == "pip" else "torch"
        (packages / f"{name}-2.0.dist-info").mkdir(parents=True)
        (tmp_path / "pyvenv.cfg").touch()
    if holds == "a file":
        (tmp_path / "notes").touch()
    monkeypatch.setattr(sys, "argv", ["make_venv.py", str(target)])
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(make_venv.venv.EnvBuilder, "create", lambda *arguments: None)
    if holds in ("a package", "a file", "linked"):
        with pytest.raises(SystemExit, match="did not create it"):
            make_venv.main()
    else:
        make_venv.main()
        assert (tmp_path / "test-extra").read_text().startswith("test")


# --- licences -------------------------------------------------------------------------------------


def test_the_copied_pybind11_licence_is_the_installed_one():
    files = [file for file in metadata.files("pybind11") or [] if file.name == "LICENSE"]
    text = (ROOT / "csrc" / "python" / "pybind11.LICENSE").read_text()
    assert [file.locate().read_text() for file in files] == [text]


def test_the_drop_in_has_the_projects_licence():
    assert (DROP_IN / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.each_python
def test_the_drop_ins_wheel_has_its_licence(dropin_wheel):
    assert licences_in(dropin_wheel) == {"LICENSE"}


def licences_in(wheel):
    """Return the license files in a wheel, by their paths in the project."""
    with zipfile.ZipFile(wheel) as archive:
        parts = [name.partition(".dist-info/licenses/") for name in archive.namelist()]
    return {path for _, found, path in parts if path and not path.endswith("/")}


# --- built packages -------------------------------------------------------------------------------


@pytest.mark.each_python
@pytest.mark.parametrize("folder", [ROOT, DROP_IN], ids=["memsaver", "the drop-in"])
def test_an_older_setuptools_is_refused_with_the_version_that_is_needed(folder):
    code = "import runpy, setuptools; setuptools.__version__ = '76.1.0'; runpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1 and "setuptools 77 or newer" in done.stderr
    assert "76.1.0" in done.stderr and "Traceback" not in done.stderr
    assert "setuptools>=77" in (folder / "pyproject.toml").read_text()


@pytest.mark.each_python
def test_an_sdist_is_unpacked_by_a_python_without_filters(tmp_path, monkeypatch):
    """Python 3.10 releases before 3.10.12 have no extraction filters."""
    spec = importlib.util.spec_from_file_location("wheels", ROOT / "build_support" / "wheels.py")
    monkeypatch.setattr(sys, "path", list(sys.path))  # the module adds to it
    wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheels)
    sdist, real = tmp_path / "memsaver-0.tar.gz", tarfile.TarFile.extractall
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(ROOT / "LICENSE", "memsaver-0/LICENSE")

    def extractall(self, path=".", members=None, *, numeric_owner=False):
        real(self, path, members, numeric_owner=numeric_owner)

    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    root = wheels.unpack(sdist, tmp_path / "sources")
    assert root.name == "memsaver-0" and (root / "LICENSE").is_file()


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build the sdist and the wheels for this Python as `make wheel` does; return their folder.

    The processes of a test run share these files, because two builds of an sdist use the same
    files.
    """
    needed = [pin for pin in EXTRAS["wheel"] if not _is_there(pin)]
    if needed:
        pytest.skip(f"not installed: {', '.join(needed)} (`make wheel` installs them)")
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder = shared / "dist"
    with (shared / "dist.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            build_packages(shared / "dist.part")
            (shared / "dist.part").rename(folder)
    return folder


def build_packages(folder):
    command = [sys.executable, "build_support/wheels.py", "--output", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        # No nvcc, and headers from the build's own requirements, as on machines without CUDA
        # toolkit. By folder, which takes a third of the time.
        env=bare(MEMSAVER_CUDA_INCLUDE="pip", MEMSAVER_BY_FOLDER="1"),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def bare(**more):
    """Return the minimal environment for a build or a program, including pip's settings."""
    kept = {k: v for k, v in os.environ.items() if k.startswith("PIP_") or k == "HOME"}
    return {**kept, "PATH": "/usr/bin:/bin", **more}


def _is_there(pin):
    name, _, version = pin.partition("==")
    try:
        return metadata.version(name) == version
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("memsaver-*.whl")
    return found


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """Install the wheels and their requirements in a new environment; return the environment's
    Python.
    """
    folder = tmp_path_factory.mktemp("clean") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, env=bare())
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *map(str, built.glob("*.whl"))], check=True, env=bare(), timeout=200)
    return folder / "bin" / "python"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_sdist_contains_the_repositorys_files(built):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not in a git repository")
    (sdist,) = built.glob("memsaver-*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert sorted(tracked - packed) == []
    assert not [name for name in packed if name.endswith((".so", ".o", ".pyc"))]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_wheel_has_the_package_and_a_manylinux_tag(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert re.search(r"-manylinux_\d+_\d+_x86_64\.whl$", wheel.name)
    shared = {name for name in names if ".so" in Path(name).name}
    tag = sys.implementation.cache_tag
    assert {re.sub(rf"_C\.{tag}.*", "_C.so", name) for name in shared} == {
        "memsaver/libmemsaver.so",
        "memsaver/libmemsaver_preload.so",
        "memsaver/libmemsaver_sim.so",
        "memsaver/_C.so",
    }
    headers = {f"memsaver/include/{path.name}" for path in (ROOT / "csrc").glob("*.h")}
    assert {"memsaver/py.typed", "memsaver/_C.pyi", *headers} <= names
    outside = {name for name in names if not name.startswith("memsaver")}
    assert outside == set()
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "memsaver").rglob("*.py")}
    # integrations/ is installed as memsaver.integrations, except for the separate distribution.
    modules = (ROOT / "integrations").rglob("*.py")
    sources |= {f"memsaver/{p.relative_to(ROOT)}" for p in modules if DROP_IN not in p.parents}
    assert {name for name in names if name.endswith(".py")} == sources
    assert licences_in(wheel) == set(PROJECT["license-files"])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ubuntu_22_04_installs_the_wheels(built):
    """Check auditwheel's platform tag: Ubuntu 22.04 has version 2.35 of the C library."""
    needs_a_c_library_before_2_38()
    for wheel in built.glob("*.whl"):
        tags = re.findall(r"manylinux_(\d+)_(\d+)_", wheel.name)
        assert tags and min((int(major), int(minor)) for major, minor in tags) <= (2, 35)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_wheel_needs_no_library_of_cuda(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".so"):
                continue
            with archive.open(name) as file:
                dynamic = ELFFile(file).get_section_by_name(".dynamic")
                needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
            assert not [library for library in needed if re.match(r"lib(cu|nv)", library)]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_installed_wheel_runs_without_the_source_tree(installed, tmp_path):
    code = "import memsaver; print(memsaver.__version__, memsaver.__file__)"
    done = subprocess.run(
        [installed, "-c", code], env={}, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    version, file = done.stdout.split()
    assert version == PROJECT["version"] and file.startswith(str(installed.parent.parent))
    for command, said in (
        ([installed.parent / "memsaver", "--version"], f"memsaver {version}"),
        ([installed, TESTS / "fixtures" / "user" / "program.py"], "['kv_cache', 'weights']"),
    ):
        done = subprocess.run(
            command,
            env={"MEMSAVER_DRIVER": "sim"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert said in done.stdout


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_drop_in_wheel_goes_with_it(installed, tmp_path):
    code = (
        "from torch_memory_saver.utils import get_binary_path_from_package as path;"
        "print(path('torch_memory_saver_hook_mode_preload'))"
    )
    done = subprocess.run(
        [installed, "-c", code],
        env={"MEMSAVER_DRIVER": "sim"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_file()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_an_installed_wheel_is_typed(installed, tmp_path):
    # As for a user: through py.typed, from another environment, without this project's settings.
    program = TESTS / "fixtures" / "user" / "program.py"
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", installed]
    done = subprocess.run(
        [*command, "--cache-dir", tmp_path, "--config-file", os.devnull, program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
