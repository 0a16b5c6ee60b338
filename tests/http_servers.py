"""Servers on 127.0.0.1 that answer each connection with what a test says, well-formed or not."""

from __future__ import annotations

import contextlib
import json
import socket
import threading


class RawServer:
    """Hands each connection to `answer(connection)`, after reading the request's head and body.

    Attributes:
        url: its address.
        requests: the requests' bytes, in their order.
    """

    def __init__(self, answer) -> None:
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
        with contextlib.suppress(OSError), connection:
            connection.settimeout(30)
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
        """Send `data` again and again, a little at a time, until the client or the test is gone."""
        while not self.ended.wait(0.02):
            connection.sendall(data)

    def close(self) -> None:
        self.ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def response(body: object, status: str = "200 OK", headers: str = "") -> bytes:
    """A whole answer; a body that is not bytes becomes JSON."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n{headers}\r\n"
    return head.encode() + text
