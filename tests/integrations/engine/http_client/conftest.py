"""Fixtures for the tests of HTTP calls: servers whose answers a test chooses."""

import contextlib

import pytest
from http_servers import RawServer


@pytest.fixture
def serve():
    """Return `serve(answer)`, which starts a server.

    `answer` is bytes or a function of the connection.
    """
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
