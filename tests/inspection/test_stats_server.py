"""Tests that the statistics server answers clients, and that the process does not depend on it."""

import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.lanes import Workplace
from watched_children import (
    Child,
    ask,
    check_lives_on,
    connect,
    names_in,
    socket_of,
    wait_until,
    watched,
)

import memsaver
from memsaver._runtime.native import LIBRARY_DIR
from memsaver.cli.watched import Found, find_processes

MIB = 1 << 20


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.preloads
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
    del rows["host_available_bytes"]  # changes independently of memsaver
    rows["tags"] = list(rows["tags"])
    return rows


def test_while_a_pause_is_in_progress(runtime):
    with Child(runtime) as child:
        child("make('t', 5000000, 'host')")
        child(
            "import ctypes; from memsaver._runtime.native import LIBRARY_DIR; "
            "sim = ctypes.CDLL(str(LIBRARY_DIR / 'libmemsaver_sim.so')); sim.sim_hold_streams(1)"
        )
        child("under_way = memsaver.pause('t', wait=False)")
        wait_until(lambda: watched(child.pid).tags[0].stats.state == "saving")
        found = watched(child.pid)  # does not wait for the pause
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


# --- start and options ----------------------------------------------------------------------------


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
def test_the_option_turns_the_server_off(runtime, env):
    with Child(runtime, **env) as child:
        if not env:
            child("memsaver.configure(top=False)")
        child("_C.region_enter('t', -1), _C.region_exit()")
        if env.get("MEMSAVER_TOP") != "nonsense":
            check_lives_on(child)
        assert child("watchers()") == [0, []] and names_in(runtime) == []


@pytest.mark.preloads
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


@pytest.mark.parametrize(
    "call", ["memsaver.stats()", "memsaver.pause()", "memsaver.state('own')", "memsaver.resume()"]
)
def test_and_from_the_first_call_about_tags_on(runtime, call):
    with Child(runtime) as child:  # without a tag there is no server
        child("memsaver.stats() and None")
        assert child("watchers()") == [0, []] and names_in(runtime) == []
    with Child(runtime, MEMSAVER_TAG="own") as child:
        child(f"{call} and None")
        (row,) = watched(child.pid).stats.tags
        assert (row.tag, row.allocations) == ("own", 0)


def test_a_folder_with_a_long_name(tmp_path, monkeypatch):
    runtime = tmp_path / ("r" * 200)
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with Child(runtime) as child:
        child("make('t', 1000)")
        assert names_in(runtime) and watched(child.pid).stats.tags


# --- clients --------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_client_that_never_reads(runtime):
    with Child(runtime) as child:
        child("[make(f'{n:0900d}', 1000) for n in range(500)] and None")
        path = socket_of(runtime, child.pid)
        with connect(path):  # the answer exceeds the socket's buffer
            start = time.monotonic()
            check_lives_on(child)  # the process itself does not wait
            assert len(ask(path)) > 500_000  # the next client is delayed by a second
            assert 0.5 < time.monotonic() - start < 5
        with connect(path) as client:
            client.shutdown(socket.SHUT_RD)
        with connect(path) as client:
            client.send(b"GET / HTTP/1.1\r\n" * 1000)
        assert len(ask(path)) > 500_000
        assert child("watchers()[0]") == 1


def test_a_hundred_clients_are_answered(runtime):
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
        check_lives_on(child)


# --- failures of the system -----------------------------------------------------------------------


def test_a_program_that_closes_unknown_descriptors(runtime):
    # The program then opens a socket, which gets the same descriptor; its clients are its own.
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
        check_lives_on(child)
        assert find_processes(child.pid).processes == ()
        child.end()
    assert names_in(runtime) == []


def test_a_program_that_closes_it_and_no_more(runtime):
    with Child(runtime) as child:
        child("make('t', 1000)")
        (_, (number,)) = child("watchers()")
        child(f"os.close({number})")
        find_processes()  # wakes the thread, whose socket is closed
        wait_until(lambda: child("named('memsaver-top')") == 0)
        check_lives_on(child)
        assert find_processes(child.pid) == Found() and names_in(runtime) == []


def test_without_a_descriptor_the_process_is_not_listed(runtime):
    with Child(runtime) as child:
        child("memsaver.device_memory() and None")
        child("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))")
        child("taken = []")
        child("while len(taken) < 200:\n try: taken.append(os.dup(2))\n except OSError: break")
        child("_C.region_enter('t', -1), _C.region_exit()")
        child("[os.close(n) for n in taken] and None")
        assert child("watchers()") == [0, []] and names_in(runtime) == []
        check_lives_on(child)


def test_a_process_that_may_open_nothing_any_more(runtime):
    # As in a sandbox: the thread cannot even wait, and ends instead of retrying.
    with Child(runtime) as child:
        child("make('t', 1000)")
        child("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 4096))")
        find_processes()  # wakes the thread
        child("time.sleep(0.1)")
        child("resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))")
        assert child("watchers()") == [0, []] and names_in(runtime) == []
        check_lives_on(child)


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
