"""The preloaded library in child processes: stand-in CUDA runtimes, a simulated driver."""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).parent.parent
FIXTURES = Path(__file__).parent / "fixtures" / "preload"
PACKAGE = Path(find_spec("memsaver").origin).parent
LIBRARY = PACKAGE / "libmemsaver_preload.so"
CC = (sysconfig.get_config_var("CC") or "cc").split()

SIM = {"MEMSAVER_DRIVER": "sim"}
NO_DRIVER = {"MEMSAVER_DRIVER": "/nonexistent/libcuda.so.1"}

# file: (what to look for in a pointer, the symbol version)
RUNTIMES = {
    "libcudart.so.13": (1, "libcudart.so.13"),
    "libcudart-faf08d9a.so.13": (2, "libcudart.so.13"),
    "libcudart.so.12": (3, "libcudart.so.12"),
}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder with everything compiled from the fixtures."""
    folder = tmp_path_factory.mktemp("preload")

    def compile_(output, source, *options):
        command = [*CC, "-O1", "-g", "-Wall", "-fPIC", str(FIXTURES / source), "-o", output]
        subprocess.run([*command, *options], cwd=folder, check=True)

    for name, (number, version) in RUNTIMES.items():
        (folder / f"{name}.map").write_text(f"{version} {{ global: *; }};\n")
        compile_(
            name,
            "standin_runtime.c",
            "-shared",
            f"-DRUNTIME_ID={number}",
            f"-Wl,-soname,{name},--version-script={name}.map",
        )
        rpath = "-Wl,-rpath,$ORIGIN,--no-as-needed"
        compile_(f"caller_{number}.so", "caller.c", "-shared", rpath, f"./{name}")
    # One that leans on whoever loads it.
    compile_("caller_0.so", "caller.c", "-shared")
    compile_("interposer.so", "interposer.c", "-shared", "-ldl")
    compile_("program", "program.c", "-pthread", rpath, "./libcudart.so.13", "-ldl")
    compile_("orphan", "orphan.c", "-ldl")
    return folder


@pytest.fixture
def run(built):
    """Runs a command, preloaded unless told; the environment is this one without memsaver's."""
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
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
        )

    return go


@pytest.fixture
def python(run):
    """Runs Python code in a preloaded child; what it prints comes back, and it must succeed."""

    def go(code, env=None, **options):
        code = "from child import *\n" + textwrap.dedent(code)
        done = run([sys.executable, "-c", code], env, **options)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout.split()

    return go


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


def test_no_runtime_is_an_error_code(run, built):
    done = run([built / "orphan"], NO_DRIVER)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3 3\n", "")


def test_no_runtime_and_a_region_still_serve(run, built):
    done = run([built / "orphan"], {**SIM, "MEMSAVER_TAG": "all"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 0\n", "")


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


def program_lines(whose, at_exit=None):
    pair = f"0 {whose} 0"
    at_exit = at_exit or pair
    return [
        f"constructor {pair}",
        f"main {pair}",
        "threads 0",
        f"atexit {at_exit}",
        f"destructor {at_exit}",
    ]


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


# Which runtime serves each caller; "without" says whether the dynamic linker binds it alone.
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


# Not "after" with a local runtime: RTLD_NEXT, which the interposer uses, never looks there.
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


# --- regions --------------------------------------------------------------------------------------


def test_a_region_is_served_by_the_core(python):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        before = caller.malloc(MIB)
        core.enter("weights", 1)
        small, large = caller.malloc(512), caller.malloc(4 * MIB)
        assert caller.status == 0 and core.owns(small) and core.owns(large)
        assert large % (2 * MIB) == 0 and small % 512 == 0
        runtime.calls()
        assert caller.free(before) == 0 and runtime.live == 0
        print(*runtime.calls())
        core.leave()
        after = caller.malloc(MIB)
        assert runtime_of(after) == 1 and not core.owns(after)
        assert caller.free(small) == 0 and caller.free(large) == 0
        assert caller.free(large) == 1, "a second free is the caller's mistake"
        assert caller.free(after) == 0
        print(*runtime.calls())
        """,
        SIM,
    )
    assert out == ["cudaFree", "cudaMalloc", "cudaFree"]


def test_the_device_is_the_callers_runtimes(python):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        caller.malloc(MIB)
        print(caller.status, *runtime.calls())
        """,
        SIM,
    )
    assert out == ["0", "cudaGetDevice"]


def test_out_of_memory_is_an_error_code_and_passes(python):
    out = python(
        """
        caller, core = Caller("caller_1.so"), Core()
        core.enter("t")
        caller.malloc(1 << 45)
        print(caller.status)
        pointer = caller.malloc(MIB)
        print(caller.status, core.owns(pointer), caller.free(pointer))
        """,
        SIM,
    )
    assert out == ["2", "0", "True", "0"]


def test_pause_and_resume(python):
    out = python(
        """
        caller, core = Caller("caller_1.so"), Core()
        core.enter("kv")
        kept, dropped = caller.malloc(4 * MIB), caller.malloc(4 * MIB)
        core.leave()
        core.pause("kv")
        print(core.state("kv"), caller.free(dropped), caller.malloc(64) > 0, caller.status)
        core.resume("kv")
        print(core.state("kv"), core.owns(kept), caller.free(kept))
        """,
        SIM,
    )
    assert out == ["2", "0", "True", "0", "0", "True", "0"]


@pytest.mark.parametrize(
    ("backup", "policy"), [("none", "0"), ("host", "1"), ("pageable", "2"), ("disk", "3")]
)
def test_the_environment_makes_the_process_a_region(python, backup, policy):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        pointer = caller.malloc(4 * MIB)
        assert core.owns(pointer)
        print(core.lib.ms_region_tag().decode(), core.backup("trainer"))
        core.pause()
        foreign = caller.malloc(64)
        print(runtime_of(foreign), caller.free(foreign))
        core.resume()
        print(caller.free(pointer), core.owns(caller.malloc(64)))
        """,
        {**SIM, "MEMSAVER_TAG": "trainer", "MEMSAVER_BACKUP": backup},
    )
    assert out == ["trainer", policy, "1", "0", "0", "True"]


def test_a_linked_program_in_a_whole_process_region(run, built):
    done = run([built / "program", "leak"], {**SIM, "MEMSAVER_TAG": "all"})
    lines = program_lines("ours")
    assert done.stdout.splitlines() == [*lines[:3], "leak 0", *lines[3:]]
    assert (done.returncode, done.stderr) == (42, "")


def test_a_forked_child_is_inert(python):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        ours = caller.malloc(4 * MIB)
        child = os.fork()
        if child == 0:
            try:
                pointer = caller.malloc(MIB)
                foreign = caller.status == 0 and runtime_of(pointer) == 1
                foreign = foreign and caller.free(pointer) == 0
                caller.free(ours)
                os._exit(0 if foreign else 1)
            finally:
                os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        again = caller.malloc(4 * MIB)
        print(core.owns(again), caller.free(again), caller.free(ours))
        """,
        SIM,
    )
    assert out == ["0", "True", "0", "0"]


# --- streams and handles --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "stream", "meant"), [("", 7, 7), ("", 0, 0), ("_ptsz", 7, 7), ("_ptsz", 0, 2)]
)
def test_a_free_on_a_stream_waits_for_it(python, suffix, stream, meant):
    out = python(
        f"""
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        pointer = caller.malloc_async{suffix}(MIB, {stream})
        assert caller.status == 0 and core.owns(pointer)
        runtime.calls()
        print(caller.free_async{suffix}(pointer, {stream}), *runtime.calls())
        print(caller.free(pointer))
        """,
        SIM,
    )
    relaxed = 2
    assert out == [
        "0",
        f"cudaStreamIsCapturing({meant})",
        f"cudaStreamSynchronize({meant},mode={relaxed})",
        "1",
    ]


def test_memory_may_cross_between_the_two_kinds(python):
    out = python(
        """
        caller, core = Caller("caller_1.so"), Core()
        core.enter("t")
        plain, ordered = caller.malloc(MIB), caller.malloc_async(MIB, 3)
        assert core.owns(plain) and core.owns(ordered)
        print(caller.free_async(plain, 3), caller.free(ordered))
        """,
        SIM,
    )
    assert out == ["0", "0"]


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_a_capture_keeps_its_own_nodes(python, suffix):
    out = python(
        f"""
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        ours = caller.malloc(MIB)
        runtime.capture(True)
        node = caller.malloc_async{suffix}(MIB, 3)
        print(runtime_of(node), caller.free_async{suffix}(node, 3))
        runtime.calls()
        print(caller.free_async{suffix}(ours, 3), *runtime.calls())
        runtime.capture(False)
        print(caller.free_async{suffix}(ours, 3), caller.free(ours))
        """,
        SIM,
    )
    assert out == ["1", "0", "900", "cudaStreamIsCapturing(3)", "0", "1"]


def test_plain_memory_is_ours_while_capturing(python):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("graph")
        runtime.capture(True)
        pointer = caller.malloc(4 * MIB)
        print(core.owns(pointer), *runtime.calls())
        """,
        SIM,
    )
    assert out == ["True", "cudaGetDevice"]


def test_an_ipc_handle_of_ours_never_reaches_the_runtime(python):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        pointer = caller.malloc(4 * MIB)
        runtime.calls()
        print(caller.ipc(pointer), caller.ipc(pointer + MIB), len(runtime.calls()))
        """,
        SIM,
    )
    assert out == ["801", "801", "0"]


# --- memsaver run ---------------------------------------------------------------------------------


@pytest.fixture
def cli(run):
    def go(*arguments, env=None):
        command = [sys.executable, "-m", "memsaver", "run", *map(str, arguments)]
        return run(command, env, preloaded=())

    return go


def test_run_end_to_end(cli, built):
    done = cli("--tag", "all", "--backup", "host", "--", built / "program", "leak", env=SIM)
    assert "main 0 ours 0" in done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (42, "")


@pytest.mark.parametrize("backup", ["none", "host", "pageable", "disk"])
def test_run_keeps_contents_where_it_is_told_to(cli, backup):
    code = """
        import ctypes
        import memsaver
        from child import MIB, Caller

        pointer = Caller("caller_1.so").malloc(4 * MIB)
        ctypes.memset(pointer, 7, 4 * MIB)
        memsaver.pause()
        (row,) = memsaver.stats().tags
        memsaver.resume()
        contents = set(ctypes.string_at(pointer, 4 * MIB))
        print(row.tag, row.backup, row.host_bytes > 0, row.disk_bytes > 0, contents)
        """
    code = textwrap.dedent(code)
    done = cli("--tag", "all", "--backup", backup, "--", sys.executable, "-c", code, env=SIM)
    assert (done.returncode, done.stderr) == (0, "")
    on_host, on_disk = backup in ("host", "pageable"), backup == "disk"
    contents = {7} if on_host or on_disk else {0}
    assert done.stdout == f"all {backup} {on_host} {on_disk} {contents}\n"


def test_run_without_a_tag_leaves_regions_to_the_command(cli, built):
    done = cli("--", built / "program", env=SIM)
    assert done.stdout.splitlines() == program_lines("theirs")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--", "sh", "-c", 'echo "$@"', "sh", "--tag", "x", "--", "-y"],
        ["sh", "-c", 'echo "$@"', "sh", "--tag", "x", "--", "-y"],
    ],
)
def test_run_leaves_the_commands_options_to_it(cli, arguments):
    assert cli(*arguments).stdout == "--tag x -- -y\n"


def test_run_hands_over_signals(cli):
    done = cli("--", "sh", "-c", "kill -TERM $$")
    assert done.returncode == -signal.SIGTERM
    ignored = cli("--", "grep", "SigIgn", "/proc/self/status").stdout.split()[1]
    assert not int(ignored, 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([], 2, "put it after `--`"),
        (["--"], 2, "put it after `--`"),
        (["--tag", "t"], 2, "put it after `--`"),
        (["--", ""], 2, "put it after `--`"),
        (["--tag", "", "--", "true"], 2, "the tag is empty"),
        (["--tag", "t", "--backup", "tape", "--", "true"], 2, "'pageable', 'disk'"),
        (["--backup", "host", "--", "true"], 2, "needs a tag"),
        (["--", "no-such-command-here", "-x"], 127, "not found: no-such-command-here"),
        (["--", "/no/such/file"], 127, "not found: /no/such/file"),
        (["--", "/etc/passwd"], 126, "/etc/passwd"),
        (["--frob", "--", "true"], 2, "--frob"),
    ],
)
def test_run_says_what_is_wrong(cli, arguments, status, says):
    done = cli(*arguments)
    assert done.returncode == status
    assert says in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_run_tells_a_missing_interpreter_from_a_missing_command(cli, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = cli("--", script)
    assert done.returncode == 127 and "interpreter" in done.stderr
    script.write_text("echo without a first line\n")
    done = cli("--", script)
    assert done.returncode == 126 and f"memsaver run -- sh {script}" in done.stderr


def test_version_and_help(run):
    done = run([sys.executable, "-m", "memsaver", "--version"], preloaded=())
    assert done.returncode == 0 and re.match(r"memsaver \d", done.stdout)
    done = run([sys.executable, "-m", "memsaver", "run", "--help"], preloaded=())
    assert done.returncode == 0 and "--backup" in done.stdout


# --- what the command imports ---------------------------------------------------------------------


def test_importing_preload_is_cheap(run):
    code = "import sys, memsaver.preload; print({'torch', 'numpy', 'typer'} & set(sys.modules))"
    assert run([sys.executable, "-c", code], preloaded=()).stdout == "set()\n"


def test_running_a_command_takes_no_other_commands_parts(run):
    words = [sys.executable, "-X", "importtime", "-m", "memsaver", "run", "--", "true"]
    imported = {line.split("|")[-1].strip() for line in run(words, SIM, ()).stderr.splitlines()}
    assert "memsaver.cli.run" in imported
    of_others = ("memsaver.cli.checks", "memsaver.cli.measurements", "memsaver.integrations")
    of_others += ("memsaver.traces.files", "memsaver.traces.summary", "memsaver.bare_driver")
    assert imported & set(of_others) == set()
