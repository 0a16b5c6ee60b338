"""Tests the controller and the backend for a vLLM server, with and without the plugin."""

from __future__ import annotations

import textwrap
import threading

import pytest
from http_servers import RawServer, response

import memsaver
from memsaver.integrations.engine.errors import EngineError, EngineTimeoutError
from memsaver.integrations.engine.interface import Request
from memsaver.integrations.vllm import served

START = """
import pytest
import torch
import vllm_calls
from vllm_server import Server
from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import EngineAsleepError, EngineError
from memsaver.integrations.engine.interface import Request
from memsaver.integrations.rollout import RolloutEngine
from memsaver.integrations.vllm import SleepController, Status
from memsaver.integrations.vllm.backend import backend_of

llm = LLM("tiny", enable_sleep_mode=True)
server = Server(llm)
"""


@pytest.fixture
def run(run_vllm):
    """Run lines with the `server` of an engine in the same process."""
    pytest.importorskip("httpx")

    def run(lines, **env):
        end = "\nserver.close()\nllm.shutdown()\n"
        run_vllm(START + textwrap.dedent(lines) + end, **env)

    return run


def test_a_server_sleeps_wakes_in_stages_and_is_updated(run):
    run("""
    from vllm.model_executor.models.tiny import checkpoint
    with RolloutEngine.connect(server.url, kind="vllm", timeout=30) as engine:
        assert engine.tp_size == 1 and engine.status is Status.AWAKE
        engine.update_weights(checkpoint(1), version="one")
        prompts = [[1, 2], [3], [4, 5]]
        first = engine.generate(prompts, {"max_tokens": 3})
        assert first.lengths.tolist() == [3, 3, 3] and first.weight_version == "one"
        assert server.requests.count("/v1/completions") == 1
        each = [{"max_tokens": n} for n in (1, 2, 1)]
        assert engine.generate(prompts, each).lengths.tolist() == [1, 2, 1]
        assert server.requests.count("/v1/completions") == 3
        report = engine.sleep(wait_idle=True)
        assert engine.status is Status.ASLEEP and report.bytes > 8 << 20
        with pytest.raises(EngineAsleepError):
            engine.generate(prompts, {"max_tokens": 3})
        with engine.staged_wake():
            report = engine.update_weights(checkpoint(2), bucket_bytes=600, verify="full")
        assert report.received == report.held == 9
        assert llm.collective_rpc(vllm_calls.holds, args=(2,)) == [True]
        assert engine.generate(prompts, {"max_tokens": 3}).token_ids.tolist() != (
            first.token_ids.tolist()
        )
        engine.sleep("kv_cache")
        assert engine.status is Status.WEIGHTS_ONLY
        engine.wake_up()
        engine.pause_generation("retract")
        engine.continue_generation()
    assert not llm.llm_engine.is_sleeping()
    """)


def test_an_engine_without_the_plugin_sleeps_as_vllm_does(run):
    run(
        """
    control = SleepController(server.url, timeout=30)
    assert not control.guarded and control.status is Status.AWAKE
    with pytest.raises(ConfigError, match="release the weights and the KV cache together"):
        control.sleep("kv_cache")
    control.sleep()
    assert control.status is Status.ASLEEP and llm.llm_engine.is_sleeping()
    control.wake_up("weights")
    assert control.status is Status.WEIGHTS_ONLY and llm.llm_engine.is_sleeping()
    control.wake_up()
    assert control.status is Status.AWAKE and not llm.llm_engine.is_sleeping()
    describe, server.on_server_info = server.on_server_info, None  # as another version might
    control.sleep()
    assert llm.llm_engine.is_sleeping()
    control.wake_up()
    server.on_server_info = describe
    backend = backend_of(server.url)
    assert backend.tp_size == 1
    with pytest.raises(ConfigError, match="lacks memsaver's plugin"):
        backend.begin_update(10)
    local = backend_of(llm)
    assert not local.control.guarded
    local.control.sleep()
    assert llm.llm_engine.is_sleeping()
    local.control.wake_up()
    """,
        MEMSAVER_VLLM=0,
    )


@pytest.mark.parametrize("plugin", [0, 1])
def test_what_a_server_cannot_do_is_refused(run, plugin):
    run(
        """
    backend, params = backend_of(server.url), {"max_tokens": 3}
    with pytest.raises(ConfigError, match="tokens or text"):
        backend.generate([Request([1], params, {"image": "a.png"})], 10)
    llm.llm_engine.vllm_config.model_config.skip_tokenizer_init = True
    backend = backend_of(server.url)
    for sample in backend.generate([Request([1, 2], params), Request([3], params)], 10):
        assert len(sample.token_ids) == len(sample.logprobs) == 3
    with pytest.raises(ConfigError, match="no tokenizer for texts: pass token ids"):
        backend.generate([Request([], params, text="a text")], 10)
    server.routes = False
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
        SleepController(server.url)
    with pytest.raises(EngineError, match="cannot be reached"):
        SleepController("http://127.0.0.1:1")
    """,
        MEMSAVER_VLLM=plugin,
    )


def requests_with_own_seeds(count):
    return [Request([1], {"max_tokens": 1, "seed": seed}) for seed in range(count)]


@pytest.fixture
def serve(monkeypatch):
    """Return a function that starts a server and returns it with an engine at the server's URL."""
    pytest.importorskip("httpx")
    servers = []

    def serve(answer, most_threads):
        monkeypatch.setattr(served, "_MOST_THREADS", most_threads)
        servers.append(RawServer(answer))
        return servers[0], served.ServedEngine(servers[0].url)

    yield serve
    servers[0].close()


def test_a_failed_request_ends_those_in_progress_and_sends_no_others(serve):
    arrived, ended = threading.Event(), threading.Event()

    def answer(connection):
        if not arrived.is_set() and len(server.requests) == 2:
            arrived.set()
            connection.sendall(response({}, "400 Bad Request"))
        elif connection.recv(1) == b"":  # the client has disconnected
            ended.set()

    server, engine = serve(answer, 2)
    with pytest.raises(EngineError, match="answered 400"):
        engine.samples(requests_with_own_seeds(8), 60)
    assert ended.wait(30)
    assert len(server.requests) < 8


def test_all_requests_of_a_call_share_its_timeout(serve):
    """Two answers take at least the whole timeout, so the third request is never sent."""
    slow = threading.Event()
    choice = {"index": 0, "token_ids": [1], "finish_reason": "length"}
    choice["logprobs"] = {"token_logprobs": [-0.5]}

    def answer(connection):
        slow.wait(1)
        connection.sendall(response({"choices": [choice]}))

    server, engine = serve(answer, 1)
    with pytest.raises(EngineTimeoutError):
        engine.samples(requests_with_own_seeds(4), 2)
    assert len(server.requests) <= 2


def test_a_callback_does_not_wait_without_end_for_requests_that_wait_for_its_tag(
    sim, tag, make_blocks, monkeypatch
):
    """On the requests' threads, finalizers wait for the tag of the callback."""
    pytest.importorskip("httpx")
    name = tag()
    (block,) = make_blocks(name, [4096], "host")
    engine = served.ServedEngine("http://127.0.0.1:1")
    monkeypatch.setattr(served, "_END_SECONDS", 0.2)
    monkeypatch.setattr(type(engine._client), "post", lambda *_: memsaver.resume(name))

    def callback(_):
        engine.samples(requests_with_own_seeds(2), 0.2)

    registration = memsaver.on_pause(callback, name)
    try:
        with pytest.raises(EngineTimeoutError, match="did not answer all requests"):
            memsaver.pause(name)
    finally:
        registration.remove()
    assert block.is_intact()
