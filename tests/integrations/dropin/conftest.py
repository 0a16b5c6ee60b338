"""Fixtures for processes that preload torch_memory_saver's library."""

import subprocess
import textwrap

import pytest
from dropin_preload import CC, CHILD, FIXTURES, LIBRARIES


@pytest.fixture(scope="session")
def runtime(tmp_path_factory):
    """Build a fake CUDA runtime and a library that calls it; return their folder.

    The runtime's name differs from the name of torch's runtime. Otherwise, the dynamic linker would
    use torch's runtime.
    """
    folder = tmp_path_factory.mktemp("runtime")
    name = "libcudart-faf08d9a.so.13"
    for output, source, options in (
        (name, "fake_runtime.c", ["-DRUNTIME_ID=1", f"-Wl,-soname,{name}"]),
        ("caller.so", "caller.c", ["-Wl,-rpath,$ORIGIN,--no-as-needed", f"./{name}"]),
    ):
        command = [*CC, "-O1", "-fPIC", "-shared", str(FIXTURES / source), "-o", output, *options]
        subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.fixture
def preloaded(run_dropin, dropin_site, runtime):
    """Run code in a child process with `LD_PRELOAD` set in the same way as a framework sets it."""

    def go(code, library=LIBRARIES[0], **options):
        options = {"LD_PRELOAD": str(dropin_site / library), "FIXTURES": str(runtime), **options}
        done = run_dropin(CHILD + textwrap.dedent(code), **options)
        assert done.stderr == ""
        return done

    return go
