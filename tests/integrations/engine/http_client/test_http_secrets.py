"""Tests that redirects, API keys and addresses reveal no secret to other hosts or in error
messages."""

import pytest
from http_servers import KEY, response, scheduler_state, texts_of

from memsaver.errors import ConfigError, MemsaverError
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.http.client import HttpClient
from memsaver.integrations.rollout import RolloutEngine
from memsaver.integrations.sglang import SleepController
from memsaver.integrations.sglang.engines import ServedEngine, connect


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 300, 304])
def test_a_redirect_is_an_error_and_the_key_is_not_forwarded(serve, status):
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
def test_a_redirect_without_a_valid_target_is_an_engine_error(serve, location):
    line = "" if location is None else f"Location: {location}\r\n"
    server = serve(f"HTTP/1.1 302 Found\r\n{line}Content-Length: 0\r\n\r\n".encode())
    with pytest.raises(EngineError) as caught:
        HttpClient(server.url).post("/x", {}, 30)
    assert "a:b" not in str(caught.value)


def test_a_sleep_that_is_redirected_is_not_a_sleep(serve):
    def answer(connection):
        if server.requests[-1].startswith(b"GET"):
            return connection.sendall(
                response({"internal_states": [{"memsaver": scheduler_state()}]})
            )
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
            lambda engine=engine: engine.ask("pause_generation", {}, 30).check("it"),
            lambda engine=engine: engine.states(30),
        ):
            with pytest.raises(EngineError) as caught:
                call()
            # A frame that accepted the answer may store it in a variable.
            assert "tell" not in texts_of(caught.value, variables=not status.startswith("200"))


ANSWERS_WITH_THE_KEY = [
    *(
        {name: value}
        for name in ("scheduler", "released", "idle")
        for value in (KEY, [KEY], {KEY: 1})
    ),
    *(
        {"last": {name: value}}
        for name in ("scheduler", "operation", "tags", "held", "lost", "ranks", "failure", "number")
        for value in (KEY, [KEY], {KEY: 1})
    ),
    {"last": {"failure": {"kind": KEY, "message": KEY, "tag": KEY}}},
    {"last": {"failure": {"kind": "MemsaverError", "message": "m", "needed": KEY}}},
    *(
        {"rank": {name: value}}
        for name in ("rank", "host", "pid", "seconds", "device_bytes", "copied_bytes", "failure")
        for value in (KEY, [KEY], {KEY: KEY})
    ),
]


@pytest.mark.parametrize("fields", ANSWERS_WITH_THE_KEY, ids=str)
def test_a_key_in_a_field_of_a_state_is_in_no_message(serve, fields):
    server = serve(response({"internal_states": [{"memsaver": scheduler_state(**fields)}]}))
    for call in (
        lambda: SleepController(server.url, api_key=KEY).wake_up(),
        lambda: ServedEngine(server.url, KEY).states(30),
    ):
        try:
            call()
        except MemsaverError as error:
            assert "tell" not in texts_of(error, variables=False)


def test_a_key_as_the_host_of_a_redirect_is_in_no_message(serve):
    key = "sk-SECRET-12345"
    for place in (key, key.lower()):
        server = serve(response(b"", "302 Found", f"Location: http://{place}/\r\n"))
        with pytest.raises(EngineError, match="redirect") as caught:
            HttpClient(server.url, key).get("/server_info", 30)
        assert "secret-1" not in texts_of(caught.value, variables=False).lower()


def test_no_message_contains_the_servers_own_keys(serve):
    for info in ({"admin_api_key": "hidden"}, {"admin_api_key": "hidden", "internal_states": 1}):
        with pytest.raises(EngineError) as caught:
            SleepController(serve(response(info)).url)
        assert "hidden" not in texts_of(caught.value, variables=False)


def test_no_failed_call_shows_the_key(serve):
    for url in ("http://127.0.0.1:9", "http://no-such-host.invalid", serve(b"").url):
        with pytest.raises(EngineError) as caught:
            HttpClient(url, KEY).get("/server_info", 30)
        assert "tell" not in texts_of(caught.value)
    engine = connect("http://127.0.0.1:9", KEY)
    assert "tell" not in repr(engine) + repr(vars(engine)) + repr(vars(engine._client))


def test_proxies_of_the_environment_are_ignored(serve, monkeypatch):
    proxy, server = serve(response({"proxy": 1})), serve(response({"internal_states": []}))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    ServedEngine(server.url).states(30)
    assert proxy.requests == []


BAD_KEYS = ["hidden\n", "hid\nden", "hid\r\nX: 1", "\thidden", "hid\0den", "hidd\xe9n", "\ud800hid"]


@pytest.mark.parametrize("key", [*BAD_KEYS, "", " ", 5, b"hidden", ["hidden"]], ids=repr)
def test_a_key_that_a_header_cannot_carry_is_refused_and_not_shown(key):
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
def test_an_invalid_address_is_refused_and_not_shown(url):
    for call in (
        lambda: connect(url),
        lambda: RolloutEngine.connect(url),
        lambda: RolloutEngine.connect([url]),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "hid" not in str(caught.value) and "server's address" in str(caught.value)


@pytest.mark.parametrize("base", ["", "/", "/below/a/proxy", "/below/"])
def test_an_address_may_have_a_path(serve, base):
    server = serve(response({"internal_states": []}))
    ServedEngine(server.url + base).states(30)
    path = base.rstrip("/") + "/server_info"
    assert server.requests[0].startswith(f"GET {path} HTTP/1.1".encode())


def test_without_httpx_the_error_names_the_package(run_python):
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
