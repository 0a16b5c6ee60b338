"""A process answers who watches it, and neither its own life nor anybody else's depends on that."""

import dataclasses
import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from faults.lanes import Workplace
from watched_children import Child, ask, connect, names_in, wait_until

import memsaver
from memsaver.cli.watched import Found, Process, Silent, find_processes
from memsaver.native import LIBRARY_DIR

MIB = 1 << 20


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """The folder of this test's sockets, which the reader looks into."""
    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def watched(pid):
    """What the process says to those who look; an AssertionError where it says nothing."""
    (found,) = find_processes(pid).processes
    return found


def socket_of(runtime, pid):
    (name,) = [name for name in names_in(runtime) if name.startswith(f"{pid}-")]
    return runtime / "memsaver" / name


def lives_on(child):
    """What the child is for still works."""
    assert child("(make('lives on', 1000, 'host'), memsaver.pause('lives on'))[0]") is None
    assert child("str(memsaver.state('lives on'))") == "paused"
    child("memsaver.resume('lives on') and None")


# --- what it says ---------------------------------------------------------------------------------


def test_figures_are_the_processs_own(runtime):
    with Child(runtime, MEMSAVER_SIM_DEVICES=2) as child:
        for number, kind in enumerate(("none", "host", "pageable", "disk")):
            for state in ("mapped", "paused", "resumed"):
                child(f"make('{kind} {state}', {(number + 1) * MIB}, '{kind}', {number % 2})")
        child("_C.region_enter('no memory', -1), _C.region_exit()")
        child("memsaver.pause(*(t.tag for t in memsaver.stats().tags if 'mapped' not in t.tag))")
        child("memsaver.resume(*(t.tag for t in memsaver.stats().tags if 'resumed' in t.tag))")
        child("memsaver.resume('no memory')")
        figures = child("stats()")
        found = watched(child.pid)
        told = found.stats
        assert len(told.tags) == 13 and told.host_bytes > 0 and told.disk_bytes > 0
        assert json.loads(json.dumps(_as_dict(told))) == _as_dict(figures)
        assert found.memsaver == memsaver.__version__
        assert found.driver == ("sim", 13000, True)
        assert [(d.ordinal, d.bus_id) for d in found.devices] == [
            (0, "0000:01:00.0"),
            (1, "0000:02:00.0"),
        ]
        assert found.command.split()[0] == sys.executable
        assert all(0 <= tag.age < 60 for tag in found.tags)
        paused = [tag for tag in found.tags if tag.stats.state == "paused"]
        assert paused and all("told:1" in tag.caller for tag in paused)


def _as_dict(stats):
    rows = dataclasses.asdict(stats) if dataclasses.is_dataclass(stats) else dict(stats)
    del rows["host_available_bytes"]  # which changes by itself
    rows["tags"] = list(rows["tags"])
    return rows


def test_while_a_pause_is_under_way(runtime):
    with Child(runtime) as child:
        child("make('t', 5000000, 'host')")
        child(
            "import ctypes; from memsaver.native import LIBRARY_DIR; "
            "sim = ctypes.CDLL(str(LIBRARY_DIR / 'libmemsaver_sim.so')); sim.sim_hold_streams(1)"
        )
        child("under_way = memsaver.pause('t', wait=False)")
        wait_until(lambda: watched(child.pid).tags[0].stats.state == "saving")
        found = watched(child.pid)  # it waits for nobody
        assert found.tags[0].stats.resident_bytes >= 5000000
        child("sim.sim_hold_streams(0)")
        child("under_way.wait() and None")
        assert watched(child.pid).tags[0].stats.state == "paused"


def test_any_tag_can_be_read(runtime):
    names = ['"quotes" and \\', "two\nlines\t", "\x1b[31mred\x7f", "größer ∞ 🧠", "a" * 5000]
    with Child(runtime) as child:
        for name in names:
            child(f"make({name!r}, 1000)")
        assert [row.tag for row in watched(child.pid).stats.tags] == names


# --- when there is one ----------------------------------------------------------------------------


def test_nothing_before_the_first_tag(runtime):
    with Child(runtime) as child:
        child("memsaver.device_memory() and None")
        child("memsaver.configure(share_bytes='64MiB')")
        child("(memsaver.stats(), memsaver.pause(), memsaver.trim(wait=True)) and None")
        child("with memsaver.disabled(): simulator")
        before = child("len(os.listdir('/proc/self/task'))")
        assert child("watchers()") == [0, []] and names_in(runtime) == []
        for name in ("first", "second", "third"):
            child(f"make({name!r}, 1000)")
        threads, sockets = child("watchers()")
        assert threads == 1 and len(sockets) == 1
        assert child("len(os.listdir('/proc/self/task'))") == before + 1
        for _ in range(3):
            watched(child.pid)
        assert child("watchers()") == [1, sockets]


def test_its_thread_its_socket_and_its_folder_are_private(runtime):
    before = os.umask(0)
    try:
        with Child(runtime) as child:
            child("make('t', 1000)")
            path = socket_of(runtime, child.pid)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            (_, (number,)) = child("watchers()")
            assert child(f"os.get_inheritable({number})") is False
            for task in Path(f"/proc/{child.pid}/task").iterdir():
                if (task / "comm").read_text().strip() == "memsaver-top":
                    text = (task / "status").read_text()
                    blocked = int(text.split("SigBlk:")[1].split()[0], 16)
            for wanted in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM):
                assert blocked >> (wanted - 1) & 1
    finally:
        os.umask(before)


@pytest.mark.parametrize("env", [{"MEMSAVER_TOP": "0"}, {"MEMSAVER_TOP": "nonsense"}, {}])
def test_the_option(runtime, env):
    with Child(runtime, **env) as child:
        if not env:
            child("memsaver.configure(top=False)")
        child("_C.region_enter('t', -1), _C.region_exit()")
        if env.get("MEMSAVER_TOP") != "nonsense":
            lives_on(child)
        assert child("watchers()") == [0, []] and names_in(runtime) == []


def test_a_preloaded_program_without_tags_has_nothing(runtime):
    libraries = [LIBRARY_DIR / "libmemsaver.so", LIBRARY_DIR / "libmemsaver_preload.so"]
    done = subprocess.run(
        ["bash", "-c", "ls /proc/$$/task | wc -l; ls >/dev/null"],
        env={**os.environ, "LD_PRELOAD": ":".join(map(str, libraries)), "MEMSAVER_TAG": "t"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.strip(), done.stderr) == ("1", "") and names_in(runtime) == []


def test_the_process_s_own_tag_is_watched_from_its_first_memory_on(runtime):
    with Child(runtime, MEMSAVER_TAG="own", MEMSAVER_BACKUP="host") as child:
        assert child("watchers()") == [0, []]
        child("blocks.append(simulator.buffer(1000))")
        (row,) = watched(child.pid).stats.tags
        assert (row.tag, row.backup) == ("own", "host")


def test_a_folder_with_a_long_name(tmp_path, monkeypatch):
    runtime = tmp_path / ("r" * 200)
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with Child(runtime) as child:
        child("make('t', 1000)")
        assert names_in(runtime) and watched(child.pid).stats.tags


# --- forks and other programs ---------------------------------------------------------------------

FORK = """
def forked(work, leave=os._exit):
    # What the child says by work(), sent back; then it leaves.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, json.dumps(work()).encode())
        leave(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return json.loads(text)
"""


@pytest.mark.parametrize("leave", ["os._exit", "sys.exit"])
def test_a_forked_child_has_nothing_of_it(runtime, leave):
    with Child(runtime) as child:
        child("make('t', 1000)")
        child(FORK)
        name = names_in(runtime)
        assert child(f"forked(watchers, {leave})") == [0, []]
        assert names_in(runtime) == name
        assert watched(child.pid).stats.tags[0].tag == "t"


def test_a_child_that_can_use_memsaver_has_its_own(runtime):
    # Forked before the driver was opened, it is a process like any other.
    with Child(runtime) as child:
        child("_C.region_enter('of the parent', -1), _C.region_exit()")
        child(FORK)
        (parents,) = names_in(runtime)
        child("work = lambda: (make('of the child', 1000), watchers(), os.listdir(folder))[1:]")
        child(f"folder = {str(runtime / 'memsaver')!r}")
        (threads, sockets), names = child("forked(work, sys.exit)")
        assert threads == 1 and len(sockets) == 1
        assert len(names) == 2 and parents in names
        assert names_in(runtime) == [parents]
        assert [row.tag for row in watched(child.pid).stats.tags] == ["of the parent"]


@pytest.mark.long
def test_forks_while_somebody_looks(runtime):
    with Child(runtime) as child:
        child("make('t', 1000)")
        child(FORK)
        path = socket_of(runtime, child.pid)
        stop = threading.Event()
        answers = []

        def look():
            while not stop.is_set():
                answers.append(ask(path))

        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        child(
            "def link_of(n):\n"
            " try: return os.readlink(f'/proc/self/fd/{n}')\n"
            " except OSError: return ''"
        )
        child("sockets = lambda: sum('socket' in link_of(n) for n in os.listdir('/proc/self/fd'))")
        child("numbers = [forked(sockets) for _ in range(60)]", timeout=60)
        stop.set()
        for thread in threads:
            thread.join()
        assert child("set(numbers) == {0}")
        assert len(answers) > 20 and all(answer.endswith(b"}\n") for answer in answers)


def test_another_program_in_its_place(runtime, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "links = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')\n"
        "         if os.path.lexists(f'/proc/self/fd/{n}')]\n"
        "print(sum('socket' in link for link in links), len(os.listdir('/proc/self/task')))\n"
        "sys.stdout.flush()\nsys.stdin.read()\n"
    )
    with Child(runtime) as child:
        child("make('t', 1000)")
        child.begin(f"os.execv(sys.executable, [sys.executable, {str(program)!r}])")
        assert child.process.stdout.readline() == "0 1\n"
        assert len(names_in(runtime)) == 1
        found = find_processes()  # nobody has it open, so whoever looks removes it
        assert (found.processes, found.silent, names_in(runtime)) == ((), (), [])


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "status", "left"),
    [
        ("", 0, 0),
        ("sys.exit(3)", 3, 0),
        ("os._exit(4)", 4, 1),
        ("os.kill(os.getpid(), 9)", -9, 1),
        ("os.kill(os.getpid(), 15)", -15, 1),
    ],
)
def test_what_a_process_leaves(runtime, end, status, left):
    with Child(runtime) as child:
        child("make('t', 1000)")
        assert len(names_in(runtime)) == 1
        child.end(end, status)
    assert len(names_in(runtime)) == left
    found = find_processes()
    assert (found.processes, found.silent, names_in(runtime)) == ((), (), [])


def test_exit_while_somebody_waits_for_an_answer(runtime):
    with Child(runtime) as child:
        child("make('t', 1000)")
        child("[make(f'{n:0500d}', 1000) for n in range(700)] and None")
        with connect(socket_of(runtime, child.pid)) as client:
            assert client.recv(1)  # it is in the middle of its answer, and waits for us
            start = time.monotonic()
            child.end()
            assert time.monotonic() - start < 5
    assert names_in(runtime) == []


def test_leftovers_of_an_earlier_process_of_the_same_number(runtime):
    with Child(runtime) as child:
        folder = runtime / "memsaver"
        folder.mkdir(mode=0o700)
        living = None
        for name in (f"{child.pid}-1", f".{child.pid}-2", f"{child.pid}-3", f"{child.pid}9-4"):
            bound = socket.socket(socket.AF_UNIX)
            bound.bind(str(folder / name))
            if name.endswith("-3"):  # of another container, say
                bound.listen()
                living = bound
            else:
                bound.close()
        (folder / "not a socket").touch()
        child("make('t', 1000)")
        names = set(names_in(runtime))
        own = {name for name in names if len(name) > 16}
        assert len(own) == 1
        assert names - own == {f"{child.pid}-3", f"{child.pid}9-4", "not a socket"}
        living.close()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("hostile", ["link", "readable", "file", "missing", "not ours"])
def test_a_folder_that_is_not_private(tmp_path, monkeypatch, hostile):
    runtime, elsewhere = tmp_path / "runtime", tmp_path / "elsewhere"
    runtime.mkdir()
    elsewhere.mkdir(mode=0o700)
    folder = runtime / "memsaver"
    if hostile == "link":
        folder.symlink_to(elsewhere)
    elif hostile == "readable":
        folder.mkdir()
        folder.chmod(0o711)
    elif hostile == "file":
        folder.touch()
    elif hostile == "missing":
        runtime.rmdir()
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        folder.mkdir(mode=0o700)
        os.chown(folder, 65534, 65534)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with Child(runtime) as child:
        child("make('t', 1000)")
        lives_on(child)
        assert list(elsewhere.iterdir()) == []
        assert not folder.is_dir() or list(folder.iterdir()) == []
        found = find_processes(child.pid)  # in /tmp
        assert [process.pid for process in found.processes] == [child.pid]
        assert found.refused == (() if hostile == "missing" else (str(folder),))
        child.end()
    assert find_processes(child.pid).processes == ()


def test_another_user_gets_no_answer(runtime):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with Child(runtime) as child:
        child("make('t', 1000)")
        path = socket_of(runtime, child.pid)
        reading, writing = os.pipe()
        other = os.fork()
        if other == 0:
            os.setresuid(65534, 65534, 65534)
            try:
                ask(path)
                os.write(writing, b"answered")
            except OSError as error:
                os.write(writing, str(error.errno).encode())
            os._exit(0)
        os.waitpid(other, 0)
        assert os.read(reading, 100) == str(errno.EACCES).encode()
        os.close(reading)
        os.close(writing)


def test_a_process_of_another_user_is_not_asked(runtime):
    # Nor does its server answer root.
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with Child(runtime) as child:
        runtime.chmod(0o777)
        for parent in [runtime, *runtime.parents][:4]:
            parent.chmod(parent.stat().st_mode | 0o055)
        os.chown(runtime, 65534, 65534)
        child("os.setresuid(65534, 65534, 65534)")
        child("make('t', 1000)")
        path = socket_of(runtime, child.pid)
        assert ask(path) == b""
        assert find_processes(child.pid).refused == (str(path.parent),)
        path.parent.chmod(0o700)
        os.chown(path.parent, 0, 0)
        (silent,) = find_processes(child.pid).silent
        assert "user 65534" in silent.why
        assert path.exists()


# --- clients --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_client_that_never_reads(runtime):
    with Child(runtime) as child:
        child("[make(f'{n:0900d}', 1000) for n in range(500)] and None")
        path = socket_of(runtime, child.pid)
        with connect(path):  # more than the socket's buffer takes
            start = time.monotonic()
            lives_on(child)  # the process itself does not wait
            assert len(ask(path)) > 500_000  # a second is all that it costs the next one
            assert 0.5 < time.monotonic() - start < 5
        with connect(path) as client:
            client.shutdown(socket.SHUT_RD)
        with connect(path) as client:
            client.send(b"GET / HTTP/1.1\r\n" * 1000)
        assert len(ask(path)) > 500_000
        assert child("watchers()[0]") == 1


def test_a_hundred_clients(runtime):
    with Child(runtime) as child:
        child("make('t', 1000)")
        path = socket_of(runtime, child.pid)
        clients = [connect(path) for _ in range(100)]
        before = child("len(os.listdir('/proc/self/fd'))")
        answers = []
        for client in clients:
            with client:
                answers.append(b"".join(iter(lambda c=client: c.recv(1 << 16), b"")))
        tags = [json.loads(answer)["tags"][0]["tag"] for answer in answers]
        assert tags == ["t"] * 100
        assert child("len(os.listdir('/proc/self/fd'))") <= before
        lives_on(child)


# --- what the system does not grant ---------------------------------------------------------------


def test_a_program_that_closes_what_it_does_not_know(runtime):
    # And then opens a socket of its own, which gets the number: its clients are its own.
    with Child(runtime) as child:
        child("make('t', 1000)")
        (_, (number,)) = child("watchers()")
        child(f"os.close({number})")
        child("own = socket.socket(socket.AF_UNIX); own.bind(b'\\0' + str(os.getpid()).encode())")
        child(f"own.listen(); own.fileno() == {number} or os.dup2(own.fileno(), {number}, False)")
        child(f"own = socket.socket(fileno={number})")
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(b"\0" + str(child.pid).encode())
            child("other, _ = own.accept(); other.send(b'mine')")
            assert client.recv(10) == b"mine"
        lives_on(child)
        assert find_processes(child.pid).processes == ()
        child.end()
    assert names_in(runtime) == []


def test_a_program_that_closes_it_and_no_more(runtime):
    with Child(runtime) as child:
        child("make('t', 1000)")
        (_, (number,)) = child("watchers()")
        child(f"os.close({number})")
        find_processes()  # wakes the thread, which finds its socket gone
        wait_until(lambda: child("named('memsaver-top')") == 0)
        lives_on(child)
        assert find_processes(child.pid) == Found() and names_in(runtime) == []


def test_without_a_descriptor(runtime):
    with Child(runtime) as child:
        child("memsaver.device_memory() and None")
        child("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))")
        child("taken = []")
        child("while len(taken) < 200:\n try: taken.append(os.dup(2))\n except OSError: break")
        child("_C.region_enter('t', -1), _C.region_exit()")
        child("[os.close(n) for n in taken] and None")
        assert child("watchers()") == [0, []] and names_in(runtime) == []
        lives_on(child)


def test_a_process_that_may_open_nothing_any_more(runtime):
    # As a sandbox has it: the thread cannot even wait then, and ends instead of trying.
    with Child(runtime) as child:
        child("make('t', 1000)")
        child("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 4096))")
        find_processes()  # wakes it
        child("time.sleep(0.1)")
        child("resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))")
        assert child("watchers()") == [0, []] and names_in(runtime) == []
        lives_on(child)


def test_a_descriptor_is_missing_when_somebody_looks(runtime):
    with Child(runtime) as child:
        child("make('t', 1000)")
        path = socket_of(runtime, child.pid)
        child("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))")
        child("taken = []")
        child("while len(taken) < 200:\n try: taken.append(os.dup(2))\n except OSError: break")
        with connect(path) as client:
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.settimeout(10)
            child("[os.close(n) for n in taken] and None")
            assert client.recv(1) == b"{"


@pytest.mark.parametrize(("call", "code", "most"), [("pthread_create", 11, 1), ("malloc", 12, 40)])
def test_calls_to_the_system_that_fail_at_its_start(runtime, tmp_path, call, code, most):
    (tmp_path / "place").mkdir()
    place = Workplace(tmp_path / "place")
    body = f"""
import ctypes
system = ctypes.CDLL(None)
assert system.os_faults_watch(b"/libmemsaver.so") == 0
u64 = ctypes.c_uint64
system.os_faults_set.argtypes = [ctypes.c_char_p, u64, ctypes.c_int, u64]
system.os_faults_clear.restype = u64

def under(nth):
    # Whether the fault was met; what works afterwards; what is left.
    files = len(os.listdir("/proc/self/fd"))
    system.os_faults_set({call.encode()!r}, nth, {code}, 1)
    refused = None
    try:
        _C.region_enter("t", -1)
    except memsaver.OutOfHostMemoryError as error:
        refused = str(error)
    met = system.os_faults_clear()
    if refused is not None:
        _C.region_enter("t", -1)
    _C.region_exit()
    threads, sockets = watchers()
    left = len(os.listdir("/proc/self/fd")) - files
    names = os.listdir(folder) if os.path.isdir(folder) else []
    names = [name for name in names if str(os.getpid()) in name]
    make("t", 1000)
    return met, refused, threads, len(sockets), left, len(names)
"""
    env = {k: place.environment[k] for k in ("LD_PRELOAD", "MEMSAVER_TEST_SYSTEM_ROOT")}
    with Child(runtime, **env) as child:
        child(FORK)
        child(f"folder = {str(runtime / 'memsaver')!r}")
        child(body)
        seen = set()
        for nth in range(1, most + 1):
            met, refused, threads, sockets, left, names = child(f"forked(lambda: under({nth}))")
            assert threads == sockets == left == names, (nth, refused)
            seen.add((bool(met), threads))
            if not met:
                break
        assert (True, 0) in seen, "a fault kept it from being watched, and nothing else"
        assert call == "pthread_create" or seen >= {(True, 0), (False, 1)}


# --- processes that do not answer -----------------------------------------------------------------


def test_a_stopped_process_is_told_as_such(runtime):
    with Child(runtime) as child, Child(runtime) as other:
        child("make('t', 1000)")
        other("make('t', 1000)")
        child.process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{child.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        start = time.monotonic()
        found = find_processes()
        assert time.monotonic() - start < 2
        assert [process.pid for process in found.processes] == [other.pid]
        (silent,) = found.silent
        assert silent.pid == child.pid and "stopped" in silent.why
        assert silent.command.startswith(sys.executable)
        child.process.send_signal(signal.SIGCONT)
        wait_until(lambda: len(find_processes().processes) == 2)


ANSWERS = {
    "nothing": (b"", "no answer"),
    "no JSON": (b"hello\n", "cannot be understood"),
    "half of it": (b'{"format": 1, "memsaver": "0.1.0", "pid": 1', "cannot be understood"),
    "another shape": (b'["format"]', "cannot be understood"),
    "another format": (b'{"format": 99, "memsaver": "9.0.0"}', "9.0.0 speaks format 99"),
    "no number": (
        b'{"format": 1, "memsaver": "1", "pid": 1, "command": "c", "time_seconds": NaN, '
        b'"driver": null, "devices": [], "tags": [], "host_bytes": 0, "host_available_bytes": 0}',
        "no number",
    ),
    "text for bytes": (
        b'{"format": 1, "memsaver": "1", "pid": 1, "command": "c", "time_seconds": 1, '
        b'"driver": null, "devices": [], "tags": [], "host_bytes": "1", "host_available_bytes": 0}',
        "no whole number",
    ),
    "deep": (b"[" * 100_000, "cannot be understood"),
}


@pytest.mark.parametrize("which", ANSWERS)
def test_what_is_no_answer(runtime, which):
    text, why = ANSWERS[which]
    with served(runtime, lambda client: client.sendall(text)):
        found = find_processes()
    (silent,) = found.silent
    assert isinstance(silent, Silent) and found.processes == ()
    assert why in silent.why and silent.pid == os.getpid()


def test_an_answer_that_never_ends(runtime):
    def trickle(client):
        while True:
            client.sendall(b" ")
            time.sleep(0.01)

    with served(runtime, trickle):
        start = time.monotonic()
        (silent,) = find_processes().silent
        assert time.monotonic() - start < 2 and "no answer within" in silent.why


def test_unknown_keys_are_left_out(runtime):
    with Child(runtime) as child:
        child("make('t', 1000)")
        told = json.loads(ask(socket_of(runtime, child.pid)))
        child.end()
    told["new"] = told["tags"][0]["new"] = told["devices"][0]["new"] = [1]
    with served(runtime, lambda client: client.sendall(json.dumps(told).encode())):
        (found,) = find_processes().processes
    assert isinstance(found, Process) and found.stats.tags[0].tag == "t"


class served:
    """A socket of this process's among those of watched ones, with an answer of the test's."""

    def __init__(self, runtime, answer):
        self.folder, self.answer = runtime / "memsaver", answer

    def __enter__(self):
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.path = self.folder / f"{os.getpid()}-abc"
        folder = os.open(self.folder, os.O_PATH)
        self.listener.bind(f"/proc/self/fd/{folder}/{self.path.name}")
        os.close(folder)
        self.listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        try:
            client, _ = self.listener.accept()
            with client:
                self.answer(client)
        except OSError:
            pass

    def __exit__(self, *exception):
        self.listener.close()
        self.path.unlink()
