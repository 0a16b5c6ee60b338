"""Child processes for tests of `memsaver top`, which run code from stdin and answer on stdout."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from child_process import environment_without

from memsaver._runtime.native import LIBRARY_DIR
from memsaver.cli.watched import Process, find_processes

LOOP = """
import json, os, socket, sys, threading, time
import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C

blocks = []

def make(tag, nbytes, backup=None, device=0):
    with memsaver.region(tag, backup=backup):
        blocks.append(simulator.buffer(nbytes, device))

def stats():
    import dataclasses
    return dataclasses.asdict(memsaver.stats())

def watchers():
    '''The names of this process's threads that answer, and its listening sockets.'''
    end = time.monotonic() + 1  # for a thread that has been started to say its name
    while True:
        threads, sockets = named("memsaver-top"), listening()
        if threads == len(sockets) or time.monotonic() > end:
            return threads, sockets
        time.sleep(0.005)

def named(name):
    count = 0
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            count += file.read().strip() == name
    return count

def listening():
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if "socket" in os.readlink(f"/proc/self/fd/{number}"):
                with socket.socket(fileno=os.dup(number)) as one:
                    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.append(number)
        except OSError:
            pass  # the directory's own
    return found

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

for line in sys.stdin:
    code = json.loads(line)
    try:
        try:
            value = eval(compile(code, "told", "eval"))
        except SyntaxError:
            value = None
            exec(code, globals())
    except Exception as error:
        value = {"error": repr(error)}
    print(json.dumps(value, default=repr), flush=True)
"""


def top_command(runtime: Path, *arguments: str) -> list[str]:
    """Return a command that runs `memsaver top` and searches only one folder."""
    code = (
        "import sys; from memsaver.cli import main, watched; "
        "watched.FALLBACK = sys.argv.pop(1); main()"
    )
    return [sys.executable, "-c", code, str(runtime / "nobody"), "top", *arguments]


class Child:
    """A child process on the simulated driver; `child("make('t', 1000)")` runs code in it."""

    def __init__(self, runtime: Path | None, *, program: list[str] | None = None, **env) -> None:
        kept = environment_without("MEMSAVER_", "XDG_RUNTIME_DIR")
        if runtime is not None:
            kept["XDG_RUNTIME_DIR"] = str(runtime)
        kept["PYTHONPATH"] = str(LIBRARY_DIR.parent)
        environment = {**kept, "MEMSAVER_DRIVER": "sim", **{k: str(v) for k, v in env.items()}}
        self.process = subprocess.Popen(
            program or [sys.executable, "-c", LOOP],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def __call__(self, code: str, timeout: float = 30):
        """Run code in the child; return the value of an expression, or None for statements."""
        self.begin(code)
        return self.answer(timeout)

    def begin(self, code: str) -> None:
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self, timeout: float = 30):
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        assert ready, "no answer"
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.process.wait()}"
        value = json.loads(line)
        assert not (isinstance(value, dict) and "error" in value), value
        return value

    def end(self, code: str = "", status: int | None = 0) -> None:
        """Stop the child: run `code` if it is not None, close stdin, and check the exit status."""
        if code:
            self.begin(code)
        self.process.stdin.close()
        ended = self.process.wait(20)
        assert status is None or ended == status, ended

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()
            except OSError:
                pass


def names_in(runtime: Path) -> list[str]:
    """Return the names of the files in the socket folder; [] if there is no folder."""
    folder = runtime / "memsaver"
    return sorted(os.listdir(folder)) if folder.exists() else []


def connect(path: Path, timeout: float = 10) -> socket.socket:
    """Connect to a socket whose path can be too long for a socket address."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(timeout)
    folder = os.open(path.parent, os.O_PATH)
    try:
        client.connect(f"/proc/self/fd/{folder}/{path.name}")
    except BaseException:
        client.close()
        raise
    finally:
        os.close(folder)
    return client


def ask(path: Path, timeout: float = 10) -> bytes:
    """Return the complete answer that the socket sends."""
    with connect(path, timeout) as client:
        return b"".join(iter(lambda: client.recv(1 << 16), b""))


def wait_until(condition, timeout: float = 10) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def socket_of(runtime: Path, pid: int) -> Path:
    """Return the path of a process's socket in the folder."""
    (name,) = [name for name in names_in(runtime) if name.startswith(f"{pid}-")]
    return runtime / "memsaver" / name


def watched(pid: int) -> Process:
    """Return the process's answer to a client; raise ValueError if it does not answer."""
    (found,) = find_processes(pid).processes
    return found


def check_lives_on(child: Child) -> None:
    """Check that the child still runs code."""
    child("make('lives on', 1000, 'host')")
    child("memsaver.pause('lives on')")
    assert child("str(memsaver.state('lives on'))") == "paused"
    child("memsaver.resume('lives on')")
