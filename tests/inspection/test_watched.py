"""Tests reports about watched processes that send a wrong answer or no answer."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from watched_children import LOOP, Child, ask, socket_of, wait_until

from memsaver.cli import watched
from memsaver.cli.watched import Found, Process, Silent, find_processes


def test_a_stopped_process_is_listed_as_not_responding(runtime):
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


def test_a_process_of_a_container_that_sees_the_same_folder(runtime):
    # The process has another id inside the container; the system reports its id outside.
    enter = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*enter, "true"]).returncode != 0:
        pytest.skip("no namespaces can be made here")
    with Child(runtime, program=[*enter, sys.executable, "-c", LOOP]) as child:
        assert child("os.getpid()") == 1
        child("make('t', 1000)")
        (found,) = find_processes().processes
        assert found.pid != 1 and found.command.startswith(sys.executable)
        assert Path(f"/proc/{found.pid}/exe").resolve() == Path(sys.executable).resolve()
        child.end()
    assert find_processes() == Found()


ANSWERS = {
    "nothing": (b"", "did not answer"),
    "no JSON": (b"hello\n", "its answer is invalid"),
    "a truncated answer": (b'{"format": 1, "memsaver": "0.1.0", "pid": 1', "its answer is invalid"),
    "another shape": (b'["format"]', "its answer is invalid"),
    "another format": (b'{"format": 99, "memsaver": "9.0.0"}', "9.0.0 uses format 99"),
    "no number": (
        b'{"format": 1, "memsaver": "1", "pid": 1, "command": "c", "time_seconds": NaN, '
        b'"driver": null, "devices": [], "tags": [], "host_bytes": 0, "host_available_bytes": 0}',
        "not a finite number",
    ),
    "text for bytes": (
        b'{"format": 1, "memsaver": "1", "pid": 1, "command": "c", "time_seconds": 1, '
        b'"driver": null, "devices": [], "tags": [], "host_bytes": "1", "host_available_bytes": 0}',
        "not a whole number",
    ),
    "deep": (b"[" * 100_000, "its answer is invalid"),
    "a number beyond any float": (
        b'{"format": 1, "memsaver": "1", "pid": 1, "command": "c", "time_seconds": 1'
        + b"0" * 400
        + b', "driver": null, "devices": [], "tags": [], "host_bytes": 0, '
        b'"host_available_bytes": 0}',
        "its answer is invalid",
    ),
    "true for bytes": (
        b'{"format": 1, "memsaver": "1", "pid": 1, "command": "c", "time_seconds": 1, '
        b'"driver": null, "devices": [], "tags": [], "host_bytes": true, '
        b'"host_available_bytes": 0}',
        "not a whole number",
    ),
    "a terminal's commands": (
        b'{"format": "\\u001b[2J\\ud800", "memsaver": "\\u001b]0;x\\u0007"}',
        "memsaver ]0;x uses format [2J, and this",
    ),
    "a format of any length": (b'{"format": "' + b"9" * 100_000 + b'"}', "this version"),
}


@pytest.mark.parametrize("which", ANSWERS)
def test_invalid_answers_are_reported(runtime, which):
    text, why = ANSWERS[which]
    with served(runtime, lambda client: client.sendall(text)):
        found = find_processes()
    (silent,) = found.silent
    assert isinstance(silent, Silent) and found.processes == ()
    assert why in silent.why and silent.pid == os.getpid()
    assert len(silent.why) < 400 and silent.why.isprintable()


def test_an_answer_that_never_ends(runtime):
    def trickle(client):
        while True:
            client.sendall(b" ")
            time.sleep(0.01)

    with served(runtime, trickle):
        start = time.monotonic()
        (silent,) = find_processes().silent
        assert time.monotonic() - start < 2 and "no answer within" in silent.why


def test_an_oversized_answer_is_not_kept_in_memory(runtime, monkeypatch):
    monkeypatch.setattr(watched, "_MOST_BYTES", 1 << 20)

    def flood(client):
        for _ in range(64):
            client.sendall(b" " * (1 << 16))

    with served(runtime, flood):
        (silent,) = find_processes().silent
        assert "more than 1 MiB" in silent.why


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
    """A socket of this process among the watched processes' sockets, whose answer the test sets."""

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
