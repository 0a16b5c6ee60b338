"""Tests that an access to paused memory on the simulated driver kills the process with an
explanation.
"""

import re
import signal

import pytest

START = """
import ctypes, faulthandler, os, signal, sys
import memsaver
from memsaver import simulator

with memsaver.region({tag!r}, backup="host"):
    block = simulator.buffer(4 << 20)
"""


@pytest.fixture
def dies(run_python):
    """Run code after `START` in a process that must end by SIGSEGV; return its stderr."""

    def run(code, tag="weights", before="", **env):
        done = run_python(before + START.format(tag=tag) + code, status=-signal.SIGSEGV, **env)
        assert done.stdout == ""
        return done.stderr

    return run


def test_the_line_names_the_tag_and_the_address(dies):
    told = dies(
        """
memsaver.pause()
print(hex(block.address + 5), file=sys.stderr, flush=True)
ctypes.string_at(block.address + 5, 1)
"""
    )
    address, line = told.splitlines()
    assert line == (
        f"memsaver: {address} was touched, memory of tag 'weights', which is paused; resume it "
        "first: memsaver.resume('weights')"
    )


def test_control_characters_in_a_tag_are_escaped(dies):
    tag = "\x1b[31mred\nline\x9b\x7f" + "é" * 200
    told = dies("memsaver.pause()\nctypes.string_at(block.address, 1)", tag)
    (line,) = told.splitlines()
    assert "memory of tag '?[31mred?line??éé" in line and line.isprintable()
    assert "é...', which is paused; resume it first" in line


@pytest.mark.parametrize("when", ["before", "after"])
def test_pythons_faulthandler_reports_too(dies, when):
    on = "import faulthandler; faulthandler.enable()\n"
    told = dies(
        "memsaver.pause()\n" + on * (when == "after") + "ctypes.string_at(block.address, 1)",
        before=on * (when == "before"),
    )
    assert len(re.findall("Fatal Python error: Segmentation fault", told)) == 1
    assert "string_at" in told
    if when == "before":
        assert told.startswith("memsaver: 0x") and "'weights', which is paused" in told


@pytest.mark.parametrize(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGSEGV)",
        "signal.raise_signal(signal.SIGSEGV)",
        "ctypes.string_at(8, 1)",
        "memsaver.resume()\nctypes.string_at(8, 1)",
    ],
)
def test_other_faults_have_no_line(dies, end):
    assert dies(f"memsaver.pause()\n{end}") == ""


def test_a_handler_of_the_program_is_called(run_python):
    """If the program's handler resolves the fault, the program continues."""
    done = run_python(
        START.format(tag="weights")
        + """
# What the handler does: makes the page readable, so that the touch succeeds.
libc = ctypes.CDLL(None)
faults = []

@ctypes.CFUNCTYPE(None, ctypes.c_int)
def handler(number):
    faults.append(number)
    libc.mprotect(ctypes.c_void_p(block.address), ctypes.c_size_t(4096), 1)

libc.signal(signal.SIGSEGV, handler)
memsaver.pause()
ctypes.string_at(block.address, 1)
print(faults)
libc.mprotect(ctypes.c_void_p(block.address), ctypes.c_size_t(4096), 0)
"""
    )
    assert done.stdout == "[11]\n" and "which is paused" in done.stderr


def test_without_a_pause_no_signal_handler_is_installed(run_python):
    run_python(
        START.format(tag="weights")
        + """
def handler():
    status = open("/proc/self/status").read()
    return int(status.split("SigCgt:")[1].split()[0], 16) & 1 << signal.SIGSEGV - 1

assert not handler()
memsaver.pause()
assert handler()
"""
    )
