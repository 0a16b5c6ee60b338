"""Tests that the preloaded library disturbs no program, and forwards calls for other memory."""

import re
import sys

import pytest
from elftools.elf.elffile import ELFFile
from preloading import LIBRARY, NO_DRIVER, SIM, program_lines
from repository import ROOT

pytestmark = [pytest.mark.preloads, pytest.mark.each_python]

# --- the binary -----------------------------------------------------------------------------------


def test_exports_are_the_list():
    text = (ROOT / "csrc" / "hooks" / "preload_list.h").read_text()
    hooks = text.split("#define MEMSAVER_HOOKS(X)")[1].split("#define")[0]
    listed = set(re.findall(r"\bX\((\w+), \(", hooks))
    assert {"cudaMalloc", "cudaFree"} <= listed
    with LIBRARY.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        exported = {symbol.name for symbol in symbols if symbol.entry.st_shndx != "SHN_UNDEF"}
    assert exported - {""} == listed


# --- it harms nothing -----------------------------------------------------------------------------

HARMLESS = {
    "true": ["/bin/true"],
    "false": ["/bin/false"],
    "shell": ["/bin/sh", "-c", "echo out; echo err >&2; exit 3"],
    "python": [sys.executable, "-c", "pass"],
    "python threads": [sys.executable, "-c", "import threading, ctypes, subprocess; print(1)"],
    "emptied environment": ["/usr/bin/env", "-i", "/bin/sh", "-c", "echo $LD_PRELOAD; exit 4"],
    "a child of a shell": ["/bin/sh", "-c", f"{sys.executable} -c 'print(5)' | cat; ls / >&2"],
}


@pytest.mark.parametrize("tag", [{}, {"MEMSAVER_TAG": "all", "MEMSAVER_BACKUP": "host"}])
@pytest.mark.parametrize("name", HARMLESS)
def test_other_programs_run_as_without(run, name, tag):
    env = {**NO_DRIVER, **tag}
    with_it = run(HARMLESS[name], env)
    without = run(HARMLESS[name], env, preloaded=())
    assert (with_it.returncode, with_it.stdout, with_it.stderr) == (
        without.returncode,
        without.stdout,
        without.stderr,
    )


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", HARMLESS)
def test_other_programs_run_beside_another_library(run, built, name, order):
    both = [str(LIBRARY), str(built / "interposer.so")]
    done = run(HARMLESS[name], NO_DRIVER, preloaded=both if order == "after" else both[::-1])
    without = run(HARMLESS[name], NO_DRIVER, preloaded=both[1:])
    assert done.returncode == without.returncode
    if name != "emptied environment":
        assert (done.stdout, done.stderr) == (without.stdout, without.stderr)


@pytest.mark.parametrize(
    ("env", "statuses"), [(NO_DRIVER, "3 3"), ({**SIM, "MEMSAVER_TAG": "all"}, "0 0")]
)
def test_no_runtime_is_an_error_code_but_in_a_region(run, built, env, statuses):
    done = run([built / "orphan"], env)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{statuses}\n", "")


def test_a_runtime_that_comes_later_is_found(python):
    out = python(
        """
        hooks = CDLL(None)
        pointer = c_void_p()
        print(hooks.cudaMalloc(byref(pointer), c_size_t(512)))
        Runtime("libcudart.so.13")
        print(hooks.cudaMalloc(byref(pointer), c_size_t(512)), runtime_of(pointer.value))
        print(hooks.cudaFree(pointer))
        """,
        NO_DRIVER,
    )
    assert out == ["3", "0", "1", "0"]


# --- forwarding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [NO_DRIVER, SIM, {**NO_DRIVER, "MEMSAVER_TAG": "all"}])
def test_a_linked_program_is_served_by_its_runtime(run, built, env):
    done = run([built / "program"], env)
    assert done.stdout.splitlines() == program_lines("theirs")
    assert (done.returncode, done.stderr) == (42, "")


def test_every_hook_passes_on_unchanged(python):
    out = python(
        """
        runtime, caller = Runtime("libcudart.so.13"), Caller("caller_1.so")
        for suffix in ("", "_async", "_async_ptsz"):
            pointer = getattr(caller, "malloc" + suffix)(4096)
            assert caller.status == 0 and runtime_of(pointer) == 1 and runtime.live == 1
            assert caller.ipc(pointer) == 0
            assert getattr(caller, "free" + suffix)(pointer) == 0 and runtime.live == 0
        print(*runtime.calls())
        """,
        SIM,
    )
    assert out == [
        *("cudaMalloc", "cudaIpcGetMemHandle", "cudaFree"),
        *("cudaMallocAsync", "cudaIpcGetMemHandle", "cudaFreeAsync"),
        *("cudaMallocAsync_ptsz", "cudaIpcGetMemHandle", "cudaFreeAsync_ptsz"),
    ]


ODD_ARGUMENTS = """
    runtime, caller = Runtime("libcudart.so.13"), Caller("caller_1.so")
    if os.environ.get("REGION"):
        Core().enter("t")
    print(caller.free(0), caller.free_async(0, 5), caller.malloc(0), caller.status)
    print(caller.lib.call_malloc(None, c_size_t(512)), caller.free(0x1234000))
    print(*runtime.calls())
"""


@pytest.mark.parametrize("region", ["", "1"])
def test_odd_arguments_are_the_runtimes_to_judge(python, region):
    out = python(ODD_ARGUMENTS, {**SIM, "REGION": region})
    assert out[:6] == ["0", "0", "0", "0", "1", "1"]
    assert out[6:] == ["cudaFree", "cudaFreeAsync", "cudaMalloc", "cudaMalloc", "cudaFree"]


def test_the_runtimes_own_errors_come_back(python):
    out = python(
        'caller = Caller("caller_1.so"); print(caller.malloc(1 << 40), caller.status)', SIM
    )
    assert out == ["0", "2"]


# The runtime that serves each caller, and whether the dynamic linker alone would bind it.
SCOPES = {
    "local": ('callers = [Caller("caller_1.so")]', ["1"], True),
    "global": ('callers = [Caller("caller_1.so", RTLD_GLOBAL)]', ["1"], True),
    "runtime global first": (
        'Runtime("libcudart.so.13", RTLD_GLOBAL); callers = [Caller("caller_1.so")]',
        ["1"],
        True,
    ),
    "two local ones": (
        'callers = [Caller("caller_1.so"), Caller("caller_2.so"), Caller("caller_3.so")]',
        ["1", "2", "3"],
        True,
    ),
    "the same version global": (
        'Runtime("libcudart.so.13", RTLD_GLOBAL); callers = [Caller("caller_2.so")]',
        ["1"],
        True,
    ),
    "another version global": (
        'Runtime("libcudart.so.12", RTLD_GLOBAL)\n'
        'callers = [Caller("caller_1.so"), Caller("caller_3.so")]',
        ["1", "3"],
        True,
    ),
    "a caller that leans on a global one": (
        'Runtime("libcudart.so.13", RTLD_GLOBAL); callers = [Caller("caller_0.so")]',
        ["1"],
        True,
    ),
    "a caller that leans on a local one": (
        'Runtime("libcudart-faf08d9a.so.13"); callers = [Caller("caller_0.so")]',
        ["2"],
        False,
    ),
}


@pytest.mark.parametrize("name", SCOPES)
def test_a_caller_reaches_the_runtime_that_it_would_without_us(python, name):
    setup, expected, also_without = SCOPES[name]
    code = f"""{setup}
for _ in range(3):
    found = []
    for caller in callers:
        pointer = caller.malloc(64)
        found.append(runtime_of(pointer))
        assert caller.status == 0 and caller.free(pointer) == 0
print(*found)
"""
    assert python(code, SIM) == expected
    if also_without:
        assert python(code, SIM, preloaded=()) == expected


def test_a_caller_is_served_after_it_was_reloaded(python):
    out = python(
        """
        import _ctypes
        for name in ("caller_1.so", "caller_2.so", "caller_1.so", "caller_2.so"):
            caller = Caller(name)
            pointer = caller.malloc(64)
            print(caller.status, caller.free(pointer))
            _ctypes.dlclose(caller.lib._handle)
        """,
        SIM,
    )
    assert out == ["0", "0"] * 4


def test_first_calls_of_many_threads_at_once(python):
    out = python(
        """
        import threading
        callers = [Caller(f"caller_{number}.so") for number in (1, 2, 3)]
        start, found = threading.Barrier(16), []
        def work(index):
            start.wait()
            for caller in callers[index % 3:] + callers[:index % 3]:
                pointer = c_void_p()
                status = caller.lib.call_malloc(byref(pointer), c_size_t(64))
                found.append((status, runtime_of(pointer.value), caller.free(pointer.value)))
        threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(len(found), *sorted(set(found)))
        """,
        NO_DRIVER,
    )
    assert "".join(out) == "48(0,1,0)(0,2,0)(0,3,0)"


def test_errno_and_dlerror_are_left_alone(python):
    out = python(
        """
        import ctypes
        libc = CDLL(None, use_errno=True)
        libc.dlerror.restype = ctypes.c_char_p
        Runtime("libcudart-faf08d9a.so.13")
        caller = CDLL(str(BUILT / "caller_0.so"), use_errno=True)
        ctypes.set_errno(77)
        pointer = c_void_p()
        print(caller.call_malloc(byref(pointer), c_size_t(64)), ctypes.get_errno())
        print(libc.dlerror())
        """,
        SIM,
    )
    assert out == ["0", "77", "None"]


# Without "after" for a local runtime: the interposer's RTLD_NEXT never searches it.
@pytest.mark.parametrize(
    ("order", "scope"),
    [("before", "RTLD_GLOBAL"), ("before", "RTLD_LOCAL"), ("after", "RTLD_GLOBAL")],
)
def test_another_interposer_sees_every_foreign_call(python, built, order, scope):
    both = [str(LIBRARY), str(built / "interposer.so")]
    out = python(
        f"""
        runtime = Runtime("libcudart.so.13", {scope})
        caller = Caller("caller_1.so")
        seen = CDLL(str(BUILT / "interposer.so")).interposer_seen
        for _ in range(3):
            pointer = caller.malloc(64)
            assert caller.status == 0 and runtime_of(pointer) == 1 and caller.free(pointer) == 0
        print(seen(), *runtime.calls())
        core = Core()
        core.enter("t")
        pointer = caller.malloc(1 << 20)
        assert core.owns(pointer) and caller.free(pointer) == 0
        print(seen())
        """,
        SIM,
        preloaded=both if order == "after" else both[::-1],
    )
    assert out[:7] == ["6", *["cudaMalloc", "cudaFree"] * 3]
    assert out[7] == ("8" if order == "before" else "6")
