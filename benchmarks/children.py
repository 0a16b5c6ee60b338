"""Run each measured library in its own child process.

The parent sends each request as one JSON line and receives one JSON line as the reply. serve.py is
the child's side. A request names a method of the child's worker and its arguments; the reply is the
method's result.
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

REPLY_SECONDS = 180  # the default limit; a child that takes longer counts as hanging
CLOSE_SECONDS = 60  # the system may have to unpin and free 32 GB

SERVE = Path(__file__).resolve().with_name("serve.py")

# torch's settings change its requests for memory; torch_memory_saver rejects some settings.
NOT_INHERITED = ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Failed(Exception):
    """A measurement failed."""


class Ended(Failed):
    """A child process exited early or was killed because it hung."""


@contextlib.contextmanager
def attempt(failures: list[str]) -> Iterator[None]:
    """Record an error that the block raises in `failures`, and continue."""
    try:
        yield
    except Failed as error:
        failures.append(str(error))


class Child:
    """A process that serves requests.

    The constructor does not wait for the process to become ready (see `ready`).

    Args:
        worker: "module:class" of the child's worker.
        name: the library's name, for messages and for the worker.
        environment: the environment variables of the child, instead of those of this process.
        cwd: the working directory of the child, instead of that of this process.
        tree: whether the child starts processes that `close` must also terminate.
        preload: the path of a library to preload; "" for none.
        label: the child's name in messages and in `name`, instead of the library's name; required
            for several children of one library.
        settings: additional arguments of the worker.
    """

    def __init__(
        self,
        worker: str,
        name: str,
        *,
        environment: Mapping[str, str] = os.environ,
        cwd: str | None = None,
        tree: bool = False,
        preload: str = "",
        label: str = "",
        **settings: Any,
    ) -> None:
        self.name = label or name
        self._buffer = b""
        self._tree = tree
        environment = {key: text for key, text in environment.items() if key not in NOT_INHERITED}
        if preload:
            environment["LD_PRELOAD"] = preload
        self._process = subprocess.Popen(
            [sys.executable, str(SERVE), worker, name, json.dumps(settings)],
            env=environment,
            cwd=cwd,
            start_new_session=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def ready(self) -> None:
        """Wait until the child has imported its modules, because imports disturb measurements."""
        self.ask("ready")

    def ask(self, do: str, within: float = REPLY_SECONDS, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait at most `within` seconds for its reply."""
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
        """Stop the process, or kill it if it hangs.

        The process's memory is free when this method returns.
        """
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
        """Kill the processes that the child started in its process group."""
        if self._tree:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._tree = False

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
