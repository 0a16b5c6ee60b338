"""Fixtures of processes that are preloaded with torch_memory_saver's library."""

from __future__ import annotations

import subprocess
import sysconfig
import textwrap

import pytest
from repository import TESTS

FIXTURES = TESTS / "fixtures" / "preload"
LIBRARY = "torch_memory_saver_hook_mode_preload.abi3.so"
CC = (sysconfig.get_config_var("CC") or "cc").split()


@pytest.fixture(scope="session")
def runtime(tmp_path_factory):
    """Build a fake CUDA runtime, and a library that calls it; return their folder."""
    folder = tmp_path_factory.mktemp("runtime")
    for output, source, options in (
        ("libcudart.so.13", "standin_runtime.c", ["-DRUNTIME_ID=1", "-Wl,-soname,libcudart.so.13"]),
        ("caller.so", "caller.c", ["-Wl,-rpath,$ORIGIN,--no-as-needed", "./libcudart.so.13"]),
    ):
        command = [*CC, "-O1", "-fPIC", "-shared", str(FIXTURES / source), "-o", output, *options]
        subprocess.run(command, cwd=folder, check=True)
    return folder


CHILD = """
from child import Caller
caller = Caller("caller.so")
assert caller.lib is not None

def filled(byte, nbytes=3 * MIB):
    import ctypes
    pointer = caller.malloc(nbytes)
    assert pointer, caller.status
    ctypes.memset(pointer, byte, nbytes)
    return (ctypes.c_char * nbytes).from_address(pointer)

def has(array, byte):
    return bytes(array) == bytes([byte]) * len(array)
"""


@pytest.fixture
def preloaded(run_dropin, dropin_site, runtime):
    """Run code in a child with `LD_PRELOAD` set as a framework sets it itself."""

    def go(code, library=LIBRARY, **options):
        options = {"LD_PRELOAD": str(dropin_site / library), "FIXTURES": str(runtime), **options}
        done = run_dropin(CHILD + textwrap.dedent(code), **options)
        assert done.stderr == ""
        return done

    return go
