"""An httpx transport with one deadline for a whole call.

httpx's own timeouts apply to each read, so a server that occasionally sends a byte never exceeds
them. This transport sets the timeout of every socket operation to the time that remains until the
deadline. Importing this module requires httpx.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpcore
import httpx

from memsaver._runtime.background import start_daemon
from memsaver._runtime.latches import Latch

__all__ = ["DeadlineTransport"]


class DeadlineTransport(httpx.BaseTransport):  # type: ignore[misc]  # its base is Any to mypy
    """A transport that sends one request on its own connection, without redirects or proxies.

    Raises `httpcore`'s exceptions, including `httpcore.TimeoutException` at the deadline.

    Args:
        deadline: a time on the clock of `time.monotonic()`.
        tls: the TLS context, if the server uses https.
        opened: a collection that contains the connection's socket until the socket is closed.
    """

    def __init__(
        self, deadline: float, tls: ssl.SSLContext | None, opened: set[socket.socket]
    ) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=tls, max_keepalive_connections=0, network_backend=_Sockets(deadline, opened)
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request, and return the response before its body is read."""
        url = request.url
        sent = httpcore.Request(
            request.method,
            httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=request.headers.raw,
            content=request.stream,
        )
        got = self._pool.handle_request(sent)
        return httpx.Response(got.status, headers=got.headers, stream=_Body(got.stream))

    def close(self) -> None:
        """Close the connection."""
        self._pool.close()


class _Body(httpx.SyncByteStream):  # type: ignore[misc]  # its base is Any to mypy
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        yield from self._stream

    def close(self) -> None:
        self._stream.close()


class _Sockets(httpcore.NetworkBackend):  # type: ignore[misc]  # its base is Any to mypy
    """A network backend that enforces the deadline and ignores httpcore's own timeouts."""

    def __init__(self, deadline: float, opened: set[socket.socket]) -> None:
        self._deadline, self._opened = deadline, opened

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        """Connect to the first of the host's addresses that accepts a connection."""
        addresses = _addresses(host, port, self._deadline)
        failure: OSError | None = None
        for number, (family, kind, protocol, _, address) in enumerate(addresses):
            try:
                connection = socket.socket(family, kind, protocol)
            except OSError as error:  # for example, the system does not support IPv6
                failure = failure or error
                continue
            try:
                # Divides the remaining time, so that one unresponsive address cannot use it up.
                connection.settimeout(_left(self._deadline) / (len(addresses) - number))
                connection.connect(address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return _Stream(connection, self._deadline, self._opened)
            except OSError as error:
                connection.close()
                failure = error
            except BaseException:
                connection.close()
                raise
        if isinstance(failure, TimeoutError):
            raise httpcore.ConnectTimeout
        raise httpcore.ConnectError((failure and failure.strerror) or "the host has no address")


class _Stream(httpcore.NetworkStream):  # type: ignore[misc]  # its base is Any to mypy
    """A connection on which every operation ends by the deadline."""

    def __init__(
        self, connection: socket.socket, deadline: float, opened: set[socket.socket]
    ) -> None:
        self._socket, self._deadline, self._opened = connection, deadline, opened
        opened.add(connection)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Return the next bytes that arrive, at most `max_bytes`; b"" at the end."""
        try:
            self._socket.settimeout(_left(self._deadline))
            return self._socket.recv(max_bytes)
        except TimeoutError:
            raise httpcore.ReadTimeout from None
        except OSError as error:
            raise httpcore.ReadError(error.strerror or type(error).__name__) from None

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Write all of `buffer`."""
        unsent = memoryview(buffer)
        try:
            while unsent:
                self._socket.settimeout(_left(self._deadline))
                unsent = unsent[self._socket.send(unsent) :]
        except TimeoutError:
            raise httpcore.WriteTimeout from None
        except OSError as error:
            raise httpcore.WriteError(error.strerror or type(error).__name__) from None

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        """Run the TLS handshake within the deadline."""
        try:
            self._socket.settimeout(_left(self._deadline))
            wrapped = ssl_context.wrap_socket(self._socket, server_hostname=server_hostname)
        except TimeoutError:
            self.close()
            raise httpcore.ConnectTimeout from None
        except OSError as error:
            self.close()
            why = getattr(error, "verify_message", "") or error.strerror or type(error).__name__
            raise httpcore.ConnectError(why) from None
        self._opened.discard(self._socket)
        return _Stream(wrapped, self._deadline, self._opened)

    def close(self) -> None:
        """Close the connection."""
        self._opened.discard(self._socket)
        self._socket.close()

    def get_extra_info(self, info: str) -> Any:
        """Return None for every name, which makes httpcore use the defaults of HTTP/1.1."""
        return None


def _left(deadline: float) -> float:
    """Return the seconds until the deadline. Raises `TimeoutError` after the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _addresses(host: str, port: int, deadline: float) -> list[Any]:
    """Return the addresses of a host given as a numeric address or a name.

    The system's resolver accepts no timeout, so it runs in its own thread. If the deadline passes
    first, that thread outlives the call.
    """
    try:
        return _resolved(host, port, socket.AI_NUMERICHOST)
    except OSError:
        pass
    found: list[Any] = []
    failures: list[str] = []
    done = Latch()

    def look_up() -> None:
        try:
            found.extend(_resolved(host, port))
        except (OSError, UnicodeError) as error:
            failures.append(getattr(error, "strerror", None) or "the host's name is unknown")
        finally:
            done.open()

    start_daemon("resolve", look_up)
    if not done.wait(deadline - time.monotonic()):
        raise httpcore.ConnectTimeout
    if failures:
        raise httpcore.ConnectError(failures[0])
    return found


def _resolved(host: str, port: int, flags: int = 0) -> list[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
