"""What the tests of HTTP calls share: servers that answer as a test says."""

from __future__ import annotations

import contextlib

import pytest
from http_servers import RawServer


@pytest.fixture
def serve():
    """Starts servers: `serve(answer)`, which gets the connection, or the bytes to send."""
    with contextlib.ExitStack() as cleanup:

        def start(answer):
            server = RawServer(
                (lambda connection: connection.sendall(answer))
                if isinstance(answer, bytes)
                else answer
            )
            cleanup.callback(server.close)
            return server

        yield start
