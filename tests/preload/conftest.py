"""Fixtures for child processes with the preloaded library, and fake CUDA runtimes and drivers."""

import os
import subprocess
import sys
import textwrap

import pytest
from preloading import CC, FIXTURES, LIBRARY, PACKAGE, RUNTIMES


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Compile the fixtures and return their folder."""
    folder = tmp_path_factory.mktemp("preload")

    def compile_(output, source, *options):
        command = [*CC, "-O1", "-g", "-Wall", "-fPIC", str(FIXTURES / source), "-o", output]
        subprocess.run([*command, *options], cwd=folder, check=True)

    for name, (number, version) in RUNTIMES.items():
        (folder / f"{name}.map").write_text(f"{version} {{ global: *; }};\n")
        compile_(
            name,
            "fake_runtime.c",
            "-shared",
            f"-DRUNTIME_ID={number}",
            f"-Wl,-soname,{name},--version-script={name}.map",
        )
        rpath = "-Wl,-rpath,$ORIGIN,--no-as-needed"
        compile_(f"caller_{number}.so", "caller.c", "-shared", rpath, f"./{name}")
    # A library without a runtime of its own: its symbols come from the process that loads it.
    compile_("caller_0.so", "caller.c", "-shared")
    compile_("interposer.so", "interposer.c", "-shared", "-ldl")
    compile_("program", "program.c", "-pthread", rpath, "./libcudart.so.13", "-ldl")
    compile_("orphan", "orphan.c", "-ldl")
    return folder


@pytest.fixture
def run(built):
    """Run a command (preloaded by default) in this environment without memsaver's variables."""
    assert LIBRARY.is_file(), f"{LIBRARY} is not built"

    def go(command, env=None, preloaded=(str(LIBRARY),), cwd=built):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("MEMSAVER_") and name != "LD_PRELOAD"
        }
        paths = [str(FIXTURES), str(PACKAGE.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["FIXTURES"] = str(built)
        if preloaded:
            environment["LD_PRELOAD"] = ":".join(preloaded)
        environment.update(env or {})
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
        )

    return go


@pytest.fixture
def python(run):
    """Run Python code in a preloaded child, which must succeed; return the words of its output."""

    def go(code, env=None, **options):
        code = "from child import *\n" + textwrap.dedent(code)
        done = run([sys.executable, "-c", code], env, **options)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.split()

    return go
