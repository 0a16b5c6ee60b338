"""Tests watched processes' sockets across fork, exec and exit, and the access rights to them."""

import errno
import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import pytest
from watched_children import (
    Child,
    ask,
    check_lives_on,
    connect,
    names_in,
    socket_of,
    watched,
)

from memsaver.cli.watched import find_processes

pytestmark = pytest.mark.each_python

# --- forks and other programs ---------------------------------------------------------------------


@pytest.mark.parametrize("leave", ["os._exit", "sys.exit"])
def test_a_forked_child_has_nothing_of_it(runtime, leave):
    with Child(runtime) as child:
        child("make('t', 1000)")
        name = names_in(runtime)
        assert child(f"forked(watchers, {leave})") == [0, []]
        assert names_in(runtime) == name
        assert watched(child.pid).stats.tags[0].tag == "t"


def test_a_child_that_can_use_memsaver_has_its_own(runtime):
    # A child that is forked before the driver is opened is like any other process.
    with Child(runtime) as child:
        child("_C.region_enter('of the parent', -1), _C.region_exit()")
        (parents,) = names_in(runtime)
        child("work = lambda: (make('of the child', 1000), watchers(), os.listdir(folder))[1:]")
        child(f"folder = {str(runtime / 'memsaver')!r}")
        (threads, sockets), names = child("forked(work, sys.exit)")
        assert threads == 1 and len(sockets) == 1
        assert len(names) == 2 and parents in names
        assert names_in(runtime) == [parents]
        assert [row.tag for row in watched(child.pid).stats.tags] == ["of the parent"]


@pytest.mark.long
def test_forks_during_queries_leave_the_parent_serving(runtime):
    with Child(runtime) as child:
        child("make('t', 1000)")
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
        found = find_processes()  # no process has it open, so the search removes it
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
def test_the_socket_file_that_a_process_leaves(runtime, end, status, left):
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
            assert client.recv(1)  # the process is sending its answer, and waits for us
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
            if name.endswith("-3"):  # for example, of another container
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


# --- rejected folders and users -------------------------------------------------------------------


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
        check_lives_on(child)
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


def test_a_process_of_another_user_is_not_queried(monkeypatch):
    # Its server does not answer root either.
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with (
        tempfile.TemporaryDirectory(prefix="memsaver-other-") as name,  # open to other users
        Child(runtime := Path(name)) as child,
    ):
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        runtime.chmod(0o777)
        os.chown(runtime, 65534, 65534)
        # Opened by root, because the other user may not be able to enter this repository.
        assert child("simulator.active()")
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
