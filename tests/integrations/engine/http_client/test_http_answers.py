"""Tests HTTP calls to servers whose answers are malformed or not SGLang's."""

import pickle

import pytest
from http_servers import CHUNKED, KEY, OK_HEAD, response, scheduler_state, texts_of

from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import (
    EngineAsleepError,
    EngineError,
    EngineTimeoutError,
)
from memsaver.integrations.engine.http.client import HttpClient
from memsaver.integrations.engine.refusals import asleep_text
from memsaver.integrations.sglang import SleepController
from memsaver.integrations.sglang.served import ServedEngine

pytestmark = pytest.mark.each_python

BROKEN = {
    "closes at once": b"",
    "closes in the head": b"HTTP/1.1 20",
    "closes in the body": OK_HEAD + b"Content-Length: 10\r\n\r\n{}",
    "closes in a chunk": CHUNKED + b"5\r\nab",
    "an invalid chunk size": CHUNKED + b"zz\r\nab\r\n",
    "a negative size": CHUNKED + b"-5\r\nab\r\n",
    "two lengths": OK_HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "an invalid length": OK_HEAD + b"Content-Length: \xb2\r\n\r\n{}",
    "not HTTP": b"220 mail.example ESMTP\r\n",
    "an invalid status": b"HTTP/1.1 99999 Odd\r\n\r\n",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_answer_is_an_engine_error(serve, what):
    server = serve(BROKEN[what])
    with pytest.raises(EngineError) as caught:
        HttpClient(server.url, KEY).post("/release_memory_occupation", {}, 30)
    assert not isinstance(caught.value, EngineTimeoutError)
    assert server.url in str(caught.value) and KEY not in texts_of(caught.value)


@pytest.mark.parametrize("status", ["201 Created", "202 Accepted", "204 No Content"])
def test_a_success_status_other_than_200_is_an_engine_error(serve, status):
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
def test_server_info_that_is_not_sglangs_is_an_engine_error(serve, what):
    server = serve(response(NO_INFO[what]))
    with pytest.raises(EngineError) as caught:
        SleepController(server.url)
    str(caught.value).encode()  # does not raise
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


BAD_STATES = {
    "an unknown tag": scheduler_state(released=["weights", "of_another"]),
    "tags that are text": scheduler_state(released="weights"),
    "a tag that is a list": scheduler_state(released=[["weights"]]),
    "tags that are null": scheduler_state(released=None),
    "a flag that is text": scheduler_state(idle="true"),
    "a flag that is a number": scheduler_state(idle=1),
    "a name that is a number": scheduler_state(scheduler=5),
    "a number that is text": scheduler_state(last={"number": "3"}),
    "a number that is true": scheduler_state(last={"number": True}),
    "a number that is a fraction": scheduler_state(last={"number": 1.5}),
    "a number that is too large": scheduler_state(last={"number": 1 << 70}),
    "an answer that is a list": scheduler_state(last=[1]),
    "an unknown held tag": scheduler_state(last={"held": ["x"]}),
    "ranks that are a number": scheduler_state(last={"ranks": 3}),
    "bytes that are text": scheduler_state(rank={"device_bytes": {"weights": "1"}}),
    "seconds that are NaN": scheduler_state(rank={"seconds": float("nan")}),
    "seconds that are text": scheduler_state(rank={"seconds": "1"}),
    "a failure that is text": scheduler_state(last={"failure": "no"}),
    "a failure without a message": scheduler_state(last={"failure": {"kind": "EngineError"}}),
    "a scheduler's state that is a list": [],
}


@pytest.mark.parametrize("what", BAD_STATES)
def test_an_invalid_state_is_an_engine_error(serve, what):
    server = serve(response({"internal_states": [{"memsaver": BAD_STATES[what]}]}))
    with pytest.raises(EngineError):
        SleepController(server.url)


def test_a_lone_surrogate_can_be_shown_and_sent_on(serve):
    failure = {"kind": "EngineError", "message": "\ud800 failed", "tag": "\udfff"}
    good = scheduler_state(scheduler="\ud800", last={"failure": failure})
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
def test_a_payload_that_json_cannot_represent_is_refused(serve, payload):
    server = serve(response({}))
    with pytest.raises(ConfigError, match="JSON"):
        HttpClient(server.url).post("/generate", payload, 30)
    circle: dict = {}
    circle["a"] = circle
    with pytest.raises(ConfigError, match="JSON"):
        HttpClient(server.url).post("/generate", circle, 30)
    assert server.requests == []


def test_a_sleeping_servers_refusal_is_typed(serve):
    text = asleep_text({"kv_cache", "weights"}, "generate")
    server = serve(response({"error": {"message": text}}, "503 Service Unavailable"))
    with pytest.raises(EngineAsleepError) as caught:
        HttpClient(server.url).post("/generate", {}, 5)
    assert caught.value.tags == ("kv_cache", "weights") and str(caught.value) == text
    with pytest.raises(EngineAsleepError):
        ServedEngine(server.url).ask("update_weights_from_tensor", {}, 5)
    server = serve(response({"error": {"message": "overloaded"}}, "503 Service Unavailable"))
    with pytest.raises(EngineError, match="overloaded") as caught:
        HttpClient(server.url).post("/generate", {}, 5)
    assert caught.value.http_status == 503
