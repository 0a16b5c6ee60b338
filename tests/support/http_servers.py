"""Servers on 127.0.0.1 that return any bytes a test chooses, including malformed responses."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import traceback
from pathlib import Path

from repository import TESTS

from memsaver.integrations.rollout.failures import SerializedError

KEY = 'sk-"tell\\nobody"'
OK_HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1 << 20


class RawServer:
    """A server that reads each request's head and body and then calls `answer(connection)`.

    The server uses TLS if `tls` is a context.

    Attributes:
        url: the server's address.
        requests: the bytes of the requests, in order.
    """

    def __init__(self, answer, tls=None) -> None:
        self._tls = tls
        self._answer = answer
        self.requests: list[bytes] = []
        self.ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.closing(connection):
            connection.settimeout(30)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            request = b""
            while b"\r\n\r\n" not in request:
                part = connection.recv(65536)
                if not part:
                    return
                request += part
            head, _, body = request.partition(b"\r\n\r\n")
            length = 0
            for line in head.split(b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            while len(body) < length:
                body += connection.recv(65536)
            self.requests.append(head + b"\r\n\r\n" + body)
            self._answer(connection)

    def drip(self, connection: socket.socket, data: bytes) -> None:
        """Send `data` repeatedly with pauses until the client disconnects or the test ends."""
        while not self.ended.wait(0.02):
            connection.sendall(data)

    def close(self) -> None:
        self.ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def response(body: object, status: str = "200 OK", headers: str = "") -> bytes:
    """Return a complete response. A body that is not bytes is converted to JSON."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n{headers}\r\n"
    return head.encode() + text


def texts_of(error: BaseException, variables: bool = True) -> str:
    """Return all texts that an error report can show, including the causes and the frames'
    variables.
    """
    frames = error.__traceback__
    while frames is not None and TESTS in Path(frames.tb_frame.f_code.co_filename).parents:
        frames = frames.tb_next
    shown = traceback.TracebackException(type(error), error, frames, capture_locals=variables)
    return (
        "".join(shown.format())
        + repr(error)
        + repr(vars(error))
        + str(SerializedError.of(0, error))
    )


def scheduler_state(**fields):
    """Return a scheduler's state as a server reports it; `last` and `rank` set its last answer."""
    answer = {
        "scheduler": "a",
        "operation": "release",
        "tags": [],
        "released": [],
        "held": [],
        "ranks": [],
        "failure": None,
        "number": 1,
    }
    last = fields.pop("last", {})
    rank = fields.pop("rank", None)
    if rank is not None:
        report = {"rank": 0, "host": "h", "pid": 1, "seconds": 0.1, "failure": None}
        answer["ranks"] = [{**report, "device_bytes": {}, "copied_bytes": {}, **rank}]
    return {
        "scheduler": "a",
        "released": [],
        "idle": True,
        "last": {**answer, **last} if isinstance(last, dict) else last,
        **fields,
    }
