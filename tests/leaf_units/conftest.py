"""Fixtures for core units that the C ABI uses only indirectly: workers, host memory and files.

The sources in tests/native are linked with the build's object files. Each test runs one case in a
separate process. Fake system files are located below MEMSAVER_TEST_SYSTEM_ROOT.
"""

import os
import shutil
import subprocess
import sys

import pytest
from built_sources import built, sources_of_the_core
from repository import ROOT, TESTS

UNITS = [
    "platform/host_budget",
    "platform/log",
    "platform/numa",
    "platform/options",
    "platform/system_files",
    "platform/text",
    "platform/workers",
    "backup/backup_file",
]


@pytest.fixture(scope="session")
def program():
    """Build the test program and return its path."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not compiler:
        pytest.skip("no C++ compiler")
    objects = ROOT / "build" / f"native-{sys.implementation.cache_tag}" / "libmemsaver"
    parts = []
    for unit in UNITS:
        source = ROOT / "csrc" / "core" / f"{unit}.cpp"
        made = objects / f"csrc/core/{unit}.cpp.o"
        fresh = made.is_file() and made.stat().st_mtime >= source.stat().st_mtime
        fresh = fresh and "CXX" not in os.environ  # another compiler, or other flags
        parts.append(made if fresh else source)
    parts += sorted((TESTS / "native").glob("leaf_*.cpp"))
    flags = ["-std=c++17", "-pthread", "-Wall", "-Wextra", "-fPIC"]
    return built(
        "leaf_units",
        parts,
        [*flags, f"-I{ROOT / 'csrc'}", f"-I{TESTS}"],
        compiler=compiler.split(),
        libraries=["-ldl"],
        headers=[*sources_of_the_core(), TESTS / "native" / "leaf.h"],
    )


@pytest.fixture
def leaf(program, tmp_path):
    """Run a case: `leaf("workers_order", 2)` returns the lines that the case prints."""

    def run(case: str, *arguments, shell: str = "", **env) -> list[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
        environment.update({name: str(value) for name, value in env.items()})
        command = [str(program), case, *map(str, arguments)]
        if shell:
            command = ["bash", "-c", f'{shell} && exec "$@"', "bash", *command]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and not done.stderr, (done.returncode, done.stderr)
        return done.stdout.splitlines()

    return run


@pytest.fixture
def system(tmp_path, leaf):
    """Fake /proc and /sys: `system({"/proc/meminfo": ...})("available")` runs a case with these
    files.
    """

    def fake(files: dict[str, str]):
        root = tmp_path / "system"
        shutil.rmtree(root, ignore_errors=True)
        for name, text in files.items():
            path = root / name.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        def run(case: str, *arguments, **env):
            return leaf(case, *arguments, MEMSAVER_TEST_SYSTEM_ROOT=root, **env)

        return run

    return fake
