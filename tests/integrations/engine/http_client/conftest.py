"""Fixtures for the tests of HTTP calls: servers with the answers that a test chooses."""

import contextlib

import pytest
from http_servers import RawServer


@pytest.fixture
def serve():
    """Return `serve(answer)`, which starts a server. `answer` takes the connection, or is bytes."""
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
