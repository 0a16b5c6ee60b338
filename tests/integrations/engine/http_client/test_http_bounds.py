"""Tests that HTTP calls to any server respect their limits on time and size and leak nothing."""

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest
from descriptors import open_descriptors
from http_servers import CHUNKED, KEY, MIB, OK_HEAD, RawServer, response

from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import EngineError, EngineTimeoutError
from memsaver.integrations.engine.http.client import HttpClient
from memsaver.integrations.sglang import SleepController

# --- time -----------------------------------------------------------------------------------------


def dripped(start: bytes, part: bytes):
    def answer(server, connection):
        connection.sendall(start)
        server.drip(connection, part)

    return answer


ENDLESS = {
    "nothing": lambda server, connection: server.ended.wait(30),
    "a body by the byte": dripped(OK_HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
    "a body without an end": dripped(OK_HEAD + b"\r\n", b"x"),
    "chunks without an end": dripped(CHUNKED, b"1\r\nx\r\n"),
    "the size of a chunk": dripped(CHUNKED, b"0"),
    "a status line": dripped(b"HTTP/1.1 2", b"0"),
    "headers": dripped(OK_HEAD, b"X-Some: header\r\n"),
    "informational answers": dripped(b"", b"HTTP/1.1 102 Processing\r\n\r\n"),
    "a refusal's body": dripped(b"HTTP/1.1 500 No\r\nContent-Length: 100000\r\n\r\n", b"x"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_a_call_ends_at_its_deadline_if_the_server_drips_bytes(serve, what):
    server = serve(lambda connection: ENDLESS[what](server, connection))
    client = HttpClient(server.url)
    for call in (
        lambda: client.get("/server_info", 0.5),
        lambda: client.post("/release_memory_occupation", {"tags": ["weights"]}, 0.5),
    ):
        started = time.monotonic()
        with pytest.raises(EngineTimeoutError, match=r"in full within 0\.5 s"):
            call()
        assert time.monotonic() - started < 10  # generous, for a loaded machine


def test_a_server_that_does_not_read_is_a_timeout(serve):
    listener = socket.create_server(("127.0.0.1", 0))  # never accepts, so its buffers fill up
    with listener:
        client = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(EngineTimeoutError):
            client.post("/generate", {"text": "x" * (8 * MIB)}, 0.5)


def test_a_name_lookup_that_hangs_is_a_timeout(monkeypatch):
    hang = threading.Event()
    real = socket.getaddrinfo

    def slow(host, *args, flags=0, **kwargs):
        if host == "hangs.example":
            if flags:  # asks for a number only
                raise socket.gaierror
            hang.wait(30)
            host = "127.0.0.1"
        return real(host, *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        with pytest.raises(EngineTimeoutError):
            HttpClient("http://hangs.example:9").get("/server_info", 0.3)
    finally:
        hang.set()


def test_the_next_address_is_tried_if_one_fails(serve, monkeypatch):
    server = serve(OK_HEAD + b"Content-Length: 2\r\n\r\n{}")
    real = socket.getaddrinfo

    def only_the_last_works(host, port, *args, **kwargs):
        no_socket = (socket.AF_INET, socket.SOCK_RAW, 0, "", ("127.0.0.1", port))
        refused, works = (real("127.0.0.1", one, type=socket.SOCK_STREAM) for one in (unused, port))
        return [no_socket, *refused, *works]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        unused = listener.getsockname()[1]
    monkeypatch.setattr(socket, "getaddrinfo", only_the_last_works)
    assert HttpClient(server.url).get("/server_info", 30) == "{}"


TIMEOUTS = [None, float("inf"), float("nan"), 0, -1, 1e300, 10**400, True, "1", [], {}]


@pytest.mark.parametrize("timeout", TIMEOUTS, ids=lambda value: str(value)[:8])
def test_an_invalid_timeout_is_refused_before_any_request(serve, timeout):
    from memsaver.integrations.sglang.backend import backend_of

    server = serve(response({"internal_states": [], "version": "0.5.16"}))
    backend, controller = backend_of(server.url), SleepController(server.url)
    asked = len(server.requests)
    for call in (
        lambda: controller.sleep(timeout=timeout),
        lambda: controller.wake_up(timeout=timeout),
        lambda: controller.staged_wake(timeout=timeout).__enter__(),
        lambda: controller.generate("a", timeout=timeout),
        lambda: SleepController(server.url, timeout=timeout),
        lambda: backend_of(server.url, timeout=timeout),
        lambda: backend.continue_generation(timeout),
        lambda: backend.checksums(timeout),
        lambda: HttpClient(server.url).get("/server_info", timeout),
    ):
        with pytest.raises(ConfigError, match="positive number of seconds"):
            call()
    assert len(server.requests) == asked


# --- size -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start",
    [OK_HEAD + b"Content-Length: 1000000000\r\n\r\n", CHUNKED, OK_HEAD + b"\r\n"],
    ids=["declared", "chunked", "until it closes"],
)
def test_an_answer_that_is_too_large_is_not_read(serve, start):
    server = serve(start + 8 * (b"100000\r\n" + b"x" * MIB + b"\r\n"))  # a few MiB
    with pytest.raises(EngineError, match="more than the allowed 2 MiB"):
        HttpClient(server.url).post("/generate", {}, 30, max_bytes=2 * MIB)


def test_endless_headers_are_refused(serve):
    server = serve(OK_HEAD + b"X-Long: " + b"x" * MIB)
    with pytest.raises(EngineError):
        HttpClient(server.url).get("/server_info", 30)


def test_a_compressed_answer_is_refused(serve):
    server = serve(response(b"\x1f\x8b", headers="Content-Encoding: gzip\r\n"))
    with pytest.raises(EngineError, match="compressed"):
        HttpClient(server.url).get("/server_info", 30)
    assert b"accept-encoding: identity" in server.requests[0].lower()


# --- connections ----------------------------------------------------------------------------------


def test_no_call_leaves_a_connection_open(serve):
    servers = [serve(response({})), serve(OK_HEAD + b"Content-Length: 10\r\n\r\n{}")]
    dripping = serve(lambda connection: ENDLESS["headers"](dripping, connection))
    before = open_descriptors()
    for server in (*servers, dripping):
        with contextlib.suppress(EngineError):
            HttpClient(server.url).get("/server_info", 0.3)
    with contextlib.suppress(EngineError):
        HttpClient("http://127.0.0.1:9").get("/server_info", 30)
    dripping.close()
    end = time.monotonic() + 30
    while len(open_descriptors()) > len(before) and time.monotonic() < end:
        time.sleep(0.01)  # until the servers' ends are closed
    assert len(open_descriptors()) <= len(before)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl for a certificate")
def test_https_needs_a_certificate_that_is_trusted(tmp_path, monkeypatch):
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*command, *names, *files], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = RawServer(lambda connection: connection.sendall(response({"a": 1})), context)
    url = server.url.replace("http://127.0.0.1", "https://localhost")
    try:
        with pytest.raises(EngineError, match=r"cannot be reached: self.signed"):
            HttpClient(url, KEY).get("/server_info", 30)
        assert server.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        assert HttpClient(url, KEY).post("/x", {"b": "c" * MIB}, 30) == '{"a": 1}'
        with pytest.raises(EngineError, match="cannot be reached"):
            HttpClient(url.replace("localhost", "127.0.0.1")).get("/server_info", 30)
    finally:
        server.close()
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, pytest.raises(EngineTimeoutError):
        HttpClient(f"https://127.0.0.1:{silent.getsockname()[1]}").get("/server_info", 0.3)
