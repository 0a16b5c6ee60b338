"""HTTP calls to servers that misbehave: bounded in time and size, and without a secret anywhere."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
import time
import traceback

import pytest
from http_servers import RawServer, response

from memsaver.errors import ConfigError
from memsaver.integrations.rollout import RolloutEngine
from memsaver.integrations.rollout.failures import Told
from memsaver.integrations.sglang import SleepController
from memsaver.integrations.sglang.engines import ServedEngine, connect
from memsaver.integrations.sglang.errors import EngineError, EngineTimeoutError
from memsaver.integrations.sglang.http_client import HttpClient

KEY = 'sk-"tell\\nobody"'
OK_HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK_HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1 << 20


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


def texts_of(error: BaseException, variables: bool = True) -> str:
    """All that may be shown of an error, on any rank: with its causes and its frames' variables."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    shown = traceback.TracebackException(type(error), error, frames, capture_locals=variables)
    return "".join(shown.format()) + repr(error) + repr(vars(error)) + str(Told.of(0, error))


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
def test_a_call_ends_at_its_deadline_whatever_is_dripped(serve, what):
    server = serve(lambda connection: ENDLESS[what](server, connection))
    client = HttpClient(server.url)
    for call in (
        lambda: client.get("/server_info", 0.5),
        lambda: client.post("/release_memory_occupation", {"tags": ["weights"]}, 0.5),
    ):
        started = time.monotonic()
        with pytest.raises(EngineTimeoutError, match=r"in full within 0\.5 s"):
            call()
        assert time.monotonic() - started < 10  # and not for ever, on a machine of any load


def test_a_server_that_does_not_read_is_a_timeout(serve):
    listener = socket.create_server(("127.0.0.1", 0))  # accepts nothing; its buffers fill up
    with listener:
        client = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(EngineTimeoutError):
            client.post("/generate", {"text": "x" * (8 * MIB)}, 0.5)


def test_a_name_whose_look_up_hangs_is_a_timeout(monkeypatch):
    hang = threading.Event()
    real = socket.getaddrinfo

    def slow(host, *args, **kwargs):
        if host == "hangs.example" and not kwargs.get("flags"):
            hang.wait(30)
        return real("127.0.0.1" if host == "hangs.example" else host, *args, **kwargs)

    def numeric_only(host, *args, flags=0, **kwargs):
        if host == "hangs.example" and flags:
            raise socket.gaierror
        return slow(host, *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", numeric_only)
    try:
        with pytest.raises(EngineTimeoutError):
            HttpClient("http://hangs.example:9").get("/server_info", 0.3)
    finally:
        hang.set()


TIMEOUTS = [None, float("inf"), float("nan"), 0, -1, 1e300, 10**400, True, "1", [], {}]


@pytest.mark.parametrize("timeout", TIMEOUTS, ids=lambda value: str(value)[:8])
def test_an_invalid_timeout_is_refused_before_anything_is_asked(serve, timeout):
    from memsaver.integrations.rollout.sglang.backend import backend_of

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


def flood(start: bytes):
    def answer(connection):
        connection.sendall(start)
        for _ in range(8):  # some MiB, and no more
            connection.sendall(b"100000\r\n" + b"x" * MIB + b"\r\n")

    return answer


@pytest.mark.parametrize(
    "start",
    [OK_HEAD + b"Content-Length: 1000000000\r\n\r\n", CHUNKED, OK_HEAD + b"\r\n"],
    ids=["declared", "chunked", "until it closes"],
)
def test_an_answer_that_is_too_large_is_not_read(serve, start):
    server = serve(flood(start))
    with pytest.raises(EngineError, match="more than 2 MiB"):
        HttpClient(server.url).post("/generate", {}, 30, max_bytes=2 * MIB)


def test_headers_without_a_bound_are_refused(serve):
    server = serve(OK_HEAD + b"X-Long: " + b"x" * MIB)
    with pytest.raises(EngineError):
        HttpClient(server.url).get("/server_info", 30)


def test_a_compressed_answer_is_refused(serve):
    server = serve(response(b"\x1f\x8b", headers="Content-Encoding: gzip\r\n"))
    with pytest.raises(EngineError, match="compressed"):
        HttpClient(server.url).get("/server_info", 30)
    assert b"accept-encoding: identity" in server.requests[0].lower()


# --- what is no answer ----------------------------------------------------------------------------

BROKEN = {
    "closes at once": b"",
    "closes in the head": b"HTTP/1.1 20",
    "closes in the body": OK_HEAD + b"Content-Length: 10\r\n\r\n{}",
    "closes in a chunk": CHUNKED + b"5\r\nab",
    "a chunk's size that is none": CHUNKED + b"zz\r\nab\r\n",
    "a negative size": CHUNKED + b"-5\r\nab\r\n",
    "two lengths": OK_HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a length that is none": OK_HEAD + b"Content-Length: \xb2\r\n\r\n{}",
    "not HTTP": b"220 mail.example ESMTP\r\n",
    "a status that is none": b"HTTP/1.1 99999 Odd\r\n\r\n",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_answer_is_an_engine_error(serve, what):
    server = serve(BROKEN[what])
    with pytest.raises(EngineError) as caught:
        HttpClient(server.url, KEY).post("/release_memory_occupation", {}, 30)
    assert not isinstance(caught.value, EngineTimeoutError)
    assert server.url in str(caught.value) and KEY not in texts_of(caught.value)


@pytest.mark.parametrize("status", ["201 Created", "202 Accepted", "204 No Content"])
def test_a_call_that_was_not_done_is_no_success(serve, status):
    server = serve(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode())
    with pytest.raises(EngineError, match=status[:3]):
        HttpClient(server.url).post("/release_memory_occupation", {}, 30)


NO_INFO = {
    "no JSON": b"hello",
    "deep": b"[" * 200_000,
    "deep, and closed": b'{"internal_states": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a huge number": b'{"internal_states": [{"memsaver": ' + b"9" * 5000 + b"}]}",
    "a list": b"[]",
    "null": b"null",
    "no states": b"{}",
    "states that are text": b'{"internal_states": "memsaver"}',
    "states that are numbers": b'{"internal_states": [1]}',
    "not UTF-8": b"\xff\xfe{}",
}


@pytest.mark.parametrize("what", NO_INFO)
def test_what_no_sglang_server_says_of_itself(serve, what):
    server = serve(response(NO_INFO[what]))
    with pytest.raises(EngineError) as caught:
        SleepController(server.url)
    pickle.loads(pickle.dumps(str(caught.value).encode()))  # it can be shown and sent


def state(**fields):
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


BAD_STATES = {
    "an unknown tag": state(released=["weights", "of_another"]),
    "tags that are text": state(released="weights"),
    "a tag that is a list": state(released=[["weights"]]),
    "tags that are null": state(released=None),
    "a flag that is text": state(idle="true"),
    "a flag that is a number": state(idle=1),
    "a name that is a number": state(scheduler=5),
    "a number that is text": state(last={"number": "3"}),
    "a number that is true": state(last={"number": True}),
    "a number that is a fraction": state(last={"number": 1.5}),
    "a number that is too large": state(last={"number": 1 << 70}),
    "an answer that is a list": state(last=[1]),
    "an unknown held tag": state(last={"held": ["x"]}),
    "ranks that are a number": state(last={"ranks": 3}),
    "bytes that are text": state(rank={"device_bytes": {"weights": "1"}}),
    "seconds that are NaN": state(rank={"seconds": float("nan")}),
    "seconds that are text": state(rank={"seconds": "1"}),
    "a failure that is text": state(last={"failure": "no"}),
    "a failure without a message": state(last={"failure": {"kind": "EngineError"}}),
    "a scheduler's state that is a list": [],
}


@pytest.mark.parametrize("what", BAD_STATES)
def test_an_invalid_state_is_an_engine_error(serve, what):
    server = serve(response({"internal_states": [{"memsaver": BAD_STATES[what]}]}))
    with pytest.raises(EngineError):
        SleepController(server.url)


def test_a_lone_surrogate_can_be_shown_and_sent_on(serve):
    failure = {"kind": "EngineError", "message": "\ud800 failed", "tag": "\udfff"}
    good = state(scheduler="\ud800", last={"failure": failure})
    server = serve(response({"internal_states": [{"memsaver": good}]}))
    assert SleepController(server.url).guarded
    server = serve(response({"error": {"message": "\ud800 failed"}}, "400 Bad Request"))
    with pytest.raises(EngineError, match="failed") as caught:
        HttpClient(server.url).post("/x", {"name": "\ud800"}, 30)
    str(caught.value).encode()


@pytest.mark.parametrize(
    "payload",
    [{"a": float("nan")}, {"a": float("inf")}, {"a": object()}, {("a",): 1}, {"a": {1, 2}}],
    ids=["nan", "inf", "object", "key", "set"],
)
def test_what_json_cannot_say_is_never_sent(serve, payload):
    server = serve(response({}))
    with pytest.raises(ConfigError, match="JSON"):
        HttpClient(server.url).post("/generate", payload, 30)
    circle: dict = {}
    circle["a"] = circle
    with pytest.raises(ConfigError, match="JSON"):
        HttpClient(server.url).post("/generate", circle, 30)
    assert server.requests == []


# --- redirects and secrets ------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 300, 304])
def test_a_redirect_is_an_error_and_nobody_else_gets_the_key(serve, status):
    other = serve(response({"internal_states": []}))
    target = other.url.replace("//", f"//user:{KEY}@") + f"/take?key={KEY}"
    answer = f"HTTP/1.1 {status} Moved\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n"
    server = serve(answer.encode())
    client = HttpClient(server.url, KEY)
    for call in (
        lambda: client.post("/release_memory_occupation", {"tags": ["weights"]}, 30),
        lambda: client.get("/server_info", 30),
    ):
        with pytest.raises(EngineError, match="redirect") as caught:
            call()
        assert caught.value.http_status == status
        assert other.url.partition("//")[2] in str(caught.value)
        assert "tell" not in texts_of(caught.value)
    assert other.requests == [] and len(server.requests) == 2


@pytest.mark.parametrize("location", [None, "", "/elsewhere", "//[", "http://\x7f", "http://a:b@c"])
def test_a_redirect_to_nowhere(serve, location):
    line = "" if location is None else f"Location: {location}\r\n"
    server = serve(f"HTTP/1.1 302 Found\r\n{line}Content-Length: 0\r\n\r\n".encode())
    with pytest.raises(EngineError) as caught:
        HttpClient(server.url).post("/x", {}, 30)
    assert "a:b" not in str(caught.value)


def test_a_sleep_that_is_redirected_is_not_a_sleep(serve):
    def answer(connection):
        if server.requests[-1].startswith(b"GET"):
            return connection.sendall(response({"internal_states": [{"memsaver": state()}]}))
        location = f"Location: {server.url}/login\r\n"
        return connection.sendall(response(b"", "302 Found", location))

    server = serve(answer)
    controller = SleepController(server.url)
    with pytest.raises(EngineError, match="302") as caught:
        controller.sleep()
    assert caught.value.http_status == 302
    assert controller.status.value == "awake" and controller.released == set()


def test_a_key_that_the_server_repeats_is_in_no_message(serve):
    said = {"error": {"message": f"{KEY} may not"}}
    for body, status in (
        (said, "401 Unauthorized"),
        ({"success": False, "message": KEY}, "400 Bad Request"),
        (f"no such key: {KEY}".encode(), "403 Forbidden"),
        ({"success": False, "message": KEY}, "200 OK"),
        (f"<{KEY}>".encode(), "200 OK"),
    ):
        engine = ServedEngine(serve(response(body, status)).url, KEY)
        for call in (
            lambda engine=engine: engine.asked("pause_generation", {}, 30),
            lambda engine=engine: engine.states(30),
        ):
            with pytest.raises(EngineError) as caught:
                call()
            # The answer itself may be the variable of a frame, where it was accepted.
            assert "tell" not in texts_of(caught.value, variables=not status.startswith("200"))


def test_no_failed_call_shows_the_key(serve):
    for url in ("http://127.0.0.1:9", "http://no-such-host.invalid", serve(b"").url):
        with pytest.raises(EngineError) as caught:
            HttpClient(url, KEY).get("/server_info", 30)
        assert "tell" not in texts_of(caught.value)
    engine = connect("http://127.0.0.1:9", KEY)
    assert "tell" not in repr(engine) + repr(vars(engine)) + repr(vars(engine._client))


def test_the_key_goes_to_the_server(serve):
    server = serve(response({"internal_states": []}))
    ServedEngine(server.url + "/", KEY).states(30)
    head = server.requests[0].decode()
    assert head.startswith("GET /server_info HTTP/1.1\r\n")
    assert f"\r\nAuthorization: Bearer {KEY}\r\n" in head


def test_no_proxy_of_the_environment_gets_the_request(serve, monkeypatch):
    proxy, server = serve(response({"proxy": 1})), serve(response({"internal_states": []}))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    ServedEngine(server.url).states(30)
    assert proxy.requests == []


BAD_KEYS = ["hidden\n", "hid\nden", "hid\r\nX: 1", "\thidden", "hid\0den", "hidd\xe9n", "\ud800hid"]


@pytest.mark.parametrize("key", [*BAD_KEYS, "", " ", 5, b"hidden", ["hidden"]], ids=repr)
def test_a_key_that_no_header_carries_is_refused_unseen(key):
    for call in (
        lambda: connect("http://127.0.0.1:9", key),
        lambda: SleepController("http://127.0.0.1:9", api_key=key),
        lambda: RolloutEngine.connect("http://127.0.0.1:9", api_key=key),
    ):
        with pytest.raises(ConfigError, match="API key") as caught:
            call()
        assert "hid" not in str(caught.value) + repr(caught.value)


BAD_URLS = [
    "127.0.0.1:30000",
    "http://user:hidden@host:1",
    "https://hidden@host",
    "http://user:hid/den@host:1",
    "http://user:80/hidden@host",
    "user:hidden@host:30000",
    "http://host:1?key=hidden",
    "http://host:1/#hidden",
    "http://ho st",
    "http://host\nhidden",
    "http://",
    "http:///hidden",
    "http://:80",
    "http://[::1",
    "http://[::hidden]",
    "http://host:0",
    "http://host:99999",
    "http://host:hidden",
    "http://-hidden",
    "http://hid,den",
    "http://\ud800hidden",
    "http://" + "hidden" * 30,
    "file:///etc/passwd",
    "HTTP//hidden",
    "",
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_an_address_that_is_none_is_refused_unseen(url):
    for call in (
        lambda: connect(url),
        lambda: RolloutEngine.connect(url),
        lambda: RolloutEngine.connect([url]),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "hid" not in str(caught.value) and "server's address" in str(caught.value)


@pytest.mark.parametrize("engine", [None, 5, b"http://host", object(), ["http://host"]], ids=repr)
def test_what_is_no_engine_is_refused(engine):
    with pytest.raises(ConfigError):
        connect(engine)


@pytest.mark.parametrize("base", ["", "/", "/below/a/proxy", "/below/"])
def test_an_address_may_have_a_path(serve, base):
    server = serve(response({"internal_states": []}))
    ServedEngine(server.url + base).states(30)
    path = base.rstrip("/") + "/server_info"
    assert server.requests[0].startswith(f"GET {path} HTTP/1.1".encode())


def test_without_httpx_it_says_what_to_install(run_python):
    run_python(
        """
        import sys
        sys.modules["httpx"] = None
        import memsaver.integrations.rollout, memsaver.integrations.sglang.hooks
        from memsaver.errors import NotLoadedError
        from memsaver.integrations.sglang.sleep import SleepController
        try:
            SleepController("http://127.0.0.1:9")
        except NotLoadedError as error:
            assert "memsaver[http]" in str(error), error
        else:
            raise AssertionError
        """
    )


def test_driving_an_engine_of_the_process_imports_no_httpx(run_python):
    run_python(
        """
        import sys
        import memsaver.integrations.sglang.hooks, memsaver.integrations.sglang.plugin
        import memsaver.integrations.sglang.sleep, memsaver.integrations.rollout.engine
        assert not {"httpx", "httpcore", "h11"} & set(sys.modules)
        """
    )
