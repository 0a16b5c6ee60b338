"""Run an SGLang server with memsaver, and send requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from children import Failed
from engine_process import START_SECONDS, say
from libraries import OURS
from sglang_engine import environment

HOST = "127.0.0.1"


class Server:
    """A running server.

    Attributes:
        url: the server's URL.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self._process, self._port = process, port
        self.url = f"http://{HOST}:{port}"

    def is_alive(self) -> bool:
        """Return whether the server's main process is running."""
        return self._process.poll() is None

    def request(self, path: str, payload: Any = None, within: float = 60) -> tuple[int, str]:
        """Send a request (a POST if it has a payload); return the response's status and body.

        If no response arrives within `within` seconds, the status is 0 and the body is the error.
        """
        try:
            with contextlib.closing(self._connection(within)) as connection:
                self._send(connection, path, payload)
                response = connection.getresponse()
                return response.status, response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, f"{type(error).__name__}: {error}"

    def disconnect(self, path: str, payload: Any, after: float) -> None:
        """Send a request, and disconnect after `after` seconds without reading the response."""
        with contextlib.closing(self._connection(60)) as connection:
            self._send(connection, path, payload)
            time.sleep(after)

    def _connection(self, within: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(HOST, self._port, timeout=within)

    def _send(self, connection: http.client.HTTPConnection, path: str, payload: Any) -> None:
        body = None if payload is None else json.dumps(payload)
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, headers)


@contextlib.contextmanager
def serving(
    model: Path, arguments: Mapping[str, Any], variables: Mapping[str, str], log: Path
) -> Iterator[Server]:
    """Run a server for the block. Raises Failed if the server does not start.

    Args:
        model: the model's directory.
        arguments: the server's options, with the names of `sglang.Engine`'s arguments.
        variables: additional environment variables.
        log: the file for the server's output.
    """
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += flags({"host": HOST, "port": port, **arguments})
    environ = environment(OURS) | {"NO_PROXY": HOST, "no_proxy": HOST, **variables}
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            cwd=model,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    server = Server(process, port)
    try:
        while server.request("/health", within=30)[0] != 200:
            if not server.is_alive() or time.monotonic() > begin + START_SECONDS:
                raise Failed(
                    f"the server did not start:\n{log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(0.5)
        say(f"server: up after {time.monotonic() - begin:.1f} s")
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Return engine arguments as flags for the server's command line."""
    found: list[str] = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        found += [f"--{name.replace('_', '-')}", *map(str, values)]
    return found


def free_port() -> int:
    """Return a TCP port on which no process listens."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])
