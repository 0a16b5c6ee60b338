"""Child processes: each library under measurement lives in one of its own.

The parent sends requests, one JSON line each, and gets one JSON line for each (serve.py). A request
names a method of the child's worker and its arguments; the reply is what the method returned.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

REPLY_SECONDS = 180  # requests take less unless they say so; a child that takes longer hangs
CLOSE_SECONDS = 60  # the system unpins and frees 32 GB meanwhile

SERVE = Path(__file__).resolve().with_name("serve.py")

# torch's settings change what memory it asks for; torch_memory_saver refuses some.
NOT_INHERITED = ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Failed(Exception):
    """Something could not be measured."""


class Ended(Failed):
    """A child ended early, or hung and was ended."""


@contextlib.contextmanager
def attempt(failures: list[str]) -> Iterator[None]:
    """What fails inside is taken note of, and the rest goes on."""
    try:
        yield
    except Failed as error:
        failures.append(str(error))


class Child:
    """A process that serves. Starting one does not wait for it.

    Args:
        worker: "module:class" of what serves.
        name: the library's name, in messages and for the worker.
        environment: its variables, instead of this process's.
        cwd: where it runs, instead of here.
        tree: it starts processes of its own. Those that are left when it ends are ended too.
        settings: further arguments of the worker.
    """

    def __init__(
        self,
        worker: str,
        name: str,
        *,
        environment: Mapping[str, str] = os.environ,
        cwd: str | None = None,
        tree: bool = False,
        **settings: Any,
    ) -> None:
        self.name = name
        self._buffer = b""
        self._tree = tree
        self._process = subprocess.Popen(
            [sys.executable, str(SERVE), worker, name, json.dumps(settings)],
            env={key: value for key, value in environment.items() if key not in NOT_INHERITED},
            cwd=cwd,
            start_new_session=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def ready(self) -> None:
        """Waits until the child has imported what it needs, so that it disturbs nobody later."""
        self.ask("ready")

    def ask(self, do: str, within: float = REPLY_SECONDS, **arguments: Any) -> dict[str, Any]:
        """Sends a request and waits for its reply, for so many seconds."""
        assert self._process.stdin
        what = " ".join([do, *map(str, arguments.values())])
        request = json.dumps({"do": do, "arguments": arguments})
        try:
            self._process.stdin.write(request.encode() + b"\n")
        except BrokenPipeError:
            raise Ended(f"{self.name} ended early, status {self._process.wait()}") from None
        line = self._line(what, within)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            print(reply["trace"], file=sys.stderr)
            raise Failed(f"{self.name}, {what}: {reply['error']}")
        return reply

    def _line(self, what: str, within: float) -> bytes:
        assert self._process.stdout
        stream = self._process.stdout.fileno()
        end = time.monotonic() + within
        while b"\n" not in self._buffer:
            left = max(0.0, end - time.monotonic())
            if not select.select([stream], [], [], left)[0]:
                self._kill()
                raise Ended(f"{self.name} did not answer {what} in {within:.0f} s")
            read = os.read(stream, 1 << 16)
            if not read:
                status = self._process.wait()
                raise Ended(f"{self.name} ended in {what}, status {status}")
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def close(self) -> None:
        """Lets the process end, or ends it; its memory is free when this returns."""
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._end_tree()
        self._process.stdout.close()

    def _kill(self) -> None:
        self._process.kill()
        self._end_tree()

    def _end_tree(self) -> None:
        """Ends the processes that the child started; its group is what it is the first of."""
        if self._tree:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._tree = False

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
