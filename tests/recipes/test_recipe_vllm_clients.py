"""Tests memsaver's calls to vLLM's own clients and routes."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from types import SimpleNamespace

import pytest

from memsaver.integrations.engine.interface import PauseMode
from memsaver.integrations.vllm.served import ServedEngine

pytestmark = pytest.mark.recipes

# The modules of the routes for reinforcement learning, which moved, and their functions.
RL_ROUTES = (
    ("vllm.entrypoints.serve.dev.rlhf.api_router", "attach_router"),
    ("vllm.entrypoints.rl.factories", "register_rl_api_routers"),
)

CALLS = {
    "sleep": {"level": 1, "mode": "abort"},
    "wake_up": {"tags": ["weights"]},
    "reset_prefix_cache": {"reset_running_requests": True},
    "pause_generation": {"mode": "keep", "clear_cache": False},
    "resume_generation": {},
    "reset_mm_cache": {},
    "collective_rpc": {"method": "memsaver_info", "timeout": 1.0, "args": ()},
    "abort": {"request_id": ["a"], "internal": True},
    "generate": {"prompt": {}, "sampling_params": None, "request_id": "a"},
    "shutdown": {"timeout": 0},
}
OF_LLM = {
    "LLM": ("sleep", "wake_up", "reset_prefix_cache", "reset_mm_cache"),
    "LLMEngine": ("collective_rpc",),
}


def test_an_async_llm_has_the_methods_that_memsaver_calls():
    module = pytest.importorskip("vllm.v1.engine.async_llm", reason="vLLM is not installed")
    for name, named in CALLS.items():
        inspect.signature(getattr(module.AsyncLLM, name)).bind(None, **named)
    source = inspect.getsource(module.AsyncLLM)
    for attribute in ("self.output_handler", "self.output_processor", "self.engine_core"):
        assert attribute in source
    arguments = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
    fields = {name for one in arguments.__mro__ for name in getattr(one, "__annotations__", {})}
    from memsaver.integrations.vllm import launch

    assert {*launch._DEFAULT_ARGUMENTS, launch._TP_SIZE} <= fields


def test_an_llm_has_the_methods_that_memsaver_calls():
    owner = pytest.importorskip("vllm.entrypoints.llm", reason="vLLM is not installed").LLM
    engine = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
    for names, kind in ((OF_LLM["LLM"], owner), (OF_LLM["LLMEngine"], engine)):
        for name in names:
            inspect.signature(getattr(kind, name)).bind(None, **CALLS[name])
    inspect.signature(engine.add_request).bind(None, "a", {}, None)
    inspect.signature(engine.abort_request).bind(None, ["a"], internal=True)
    inspect.signature(engine.step).bind(None)
    processor = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
    assert hasattr(processor, "has_unfinished_requests")
    assert "self.request_states" in inspect.getsource(processor.__init__)


def test_the_parameters_of_a_sample_are_vllms():
    pytest.importorskip("vllm.sampling_params", reason="vLLM is not installed")
    from memsaver.errors import ConfigError
    from memsaver.integrations.engine.interface import Request
    from memsaver.integrations.vllm.samples import sampling_of

    made = sampling_of(Request([1], {"max_tokens": 3, "temperature": 0.5, "seed": 2}))
    assert (made.max_tokens, made.logprobs, made.detokenize) == (3, 0, False)
    for wrong in ({"temperature": -1}, {"max_new_tokens": 3}):
        with pytest.raises(ConfigError):
            sampling_of(Request([1], wrong))


class Client:
    """An engine client that records the calls it receives."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.output_processor = SimpleNamespace(request_states={}, parent_requests={})

    def __getattr__(self, name):
        async def call(*args, **named):
            self.calls.append((name, args, named))
            return {"is_sleeping": False, "reset_prefix_cache": True}.get(name)

        return call

    async def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        self.calls.append((method, args))
        return [{"given": list(args)}, "text"]


@pytest.fixture
def server():
    """Return a link to a server with vLLM's own routes, and the server's engine client."""
    pytest.importorskip("vllm.entrypoints.serve.dev.rpc.api_router", reason="vLLM")
    import uvicorn
    from fastapi import FastAPI

    importlib.import_module("vllm.plugins").load_general_plugins()  # memsaver's
    app = FastAPI()
    client = app.state.engine_client = Client()
    for name in ("cache", "rpc", "sleep"):
        module = importlib.import_module(f"vllm.entrypoints.serve.dev.{name}.api_router")
        module.attach_router(app)
    for name, attach in RL_ROUTES:
        with contextlib.suppress(ModuleNotFoundError):
            getattr(importlib.import_module(name), attach)(app)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        thread.join(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield ServedEngine(f"http://127.0.0.1:{port}"), client
    running.should_exit = True
    thread.join(10)


def test_a_servers_routes_reach_its_engine(server, monkeypatch):
    link, client = server
    assert link.has_plugin(10)
    assert link.rpc("memsaver_info", [["a"], 1], 10) == [{"given": [["a"], 1]}, "text"]
    assert client.calls.pop() == ("memsaver_info", (["a"], 1))
    assert link.flush(10) is True
    modes: dict[PauseMode, str] = {"abort": "abort", "in_place": "keep", "wait": "wait"}
    for mode, theirs in modes.items():
        link.pause(mode, 10)
        name, _, named = client.calls.pop()
        assert name == "pause_generation"
        assert named["mode"] == theirs and named["clear_cache"] is False
    link.pause("retract", 10)
    assert client.calls.pop()[:2] == ("reset_prefix_cache", (True, False))
    assert client.calls.pop()[2]["mode"] == "keep"
    link.unpause(10)
    assert client.calls.pop()[0] == "resume_generation"
    link.call("sleep", {"level": 2, "mode": "keep"}, 10)
    assert client.calls.pop()[1] == (2, "keep")
    link.call("reset_mm_cache", {}, 10)
    assert client.calls.pop()[0] == "reset_mm_cache"
    link.call("wake_up", {"tags": ["weights", "kv_cache"]}, 10)
    assert client.calls.pop()[1] == (["weights", "kv_cache"],)


def test_a_completion_has_the_fields_that_memsaver_sends_and_reads():
    module = pytest.importorskip("vllm.entrypoints.openai.completion.protocol", reason="vLLM")
    from memsaver.integrations.engine.interface import Request
    from memsaver.integrations.vllm.samples import completions_of, samples_in

    requests = [Request([1], {"max_tokens": 2}), Request([2, 3], {"max_tokens": 2})]
    [(numbers, body)] = completions_of([*requests])
    made = module.CompletionRequest(**body)
    assert numbers == [0, 1] and made.prompt == [[1], [2, 3]] and made.return_token_ids
    logprobs = module.CompletionLogProbs(token_logprobs=[-1.0, -2.0])
    choices = [
        module.CompletionResponseChoice(
            index=at, text="", logprobs=logprobs, finish_reason="length", token_ids=[5, 6]
        )
        for at in (1, 0)
    ]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    answer = module.CompletionResponse(model="m", choices=choices, usage=usage).model_dump()
    first, _ = samples_in(answer, 2)
    assert (first.token_ids, first.logprobs, first.finish_reason) == ([5, 6], [-1, -2], "length")


def test_the_samples_of_a_server_without_a_tokenizer_need_none():
    module = pytest.importorskip("vllm.entrypoints.openai.completion.serving", reason="vLLM")
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.logprobs import Logprob

    from memsaver.integrations.engine.interface import Request
    from memsaver.integrations.vllm.samples import completions_of

    serving = module.OpenAIServingCompletion.__new__(module.OpenAIServingCompletion)
    serving.return_tokens_as_token_ids = False
    [(_, body)] = completions_of([Request([1], {"max_tokens": 2})])
    made = serving._create_completion_logprobs(
        token_ids=[5, 6],
        top_logprobs=[{5: Logprob(-1.0)}, {6: Logprob(-2.0)}],
        num_output_top_logprobs=body["logprobs"],
        tokenizer=None,
        return_as_token_id=CompletionRequest(**body).return_tokens_as_token_ids,
    )
    assert made.token_logprobs == [-1.0, -2.0]
