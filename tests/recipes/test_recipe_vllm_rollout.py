"""Test memsaver's calls to vLLM's own engine core, layerwise reload, routes and clients."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import threading
from types import SimpleNamespace

import pytest
import torch

import memsaver
from memsaver.integrations.engine.interface import PauseMode
from memsaver.integrations.engine.messages import error_of
from memsaver.integrations.engine.status import Status
from memsaver.integrations.vllm import protocol
from memsaver.integrations.vllm.link import Link
from memsaver.integrations.vllm.reload import LayerwiseReload, is_converted
from memsaver.integrations.vllm.served import ServedEngine
from memsaver.integrations.vllm.sleep import SleepController

pytestmark = pytest.mark.recipes

MIB = 1 << 20
# The modules of the routes for reinforcement learning, which moved, and their functions.
RL_ROUTES = (
    ("vllm.entrypoints.serve.dev.rlhf.api_router", "attach_router"),
    ("vllm.entrypoints.rl.factories", "register_rl_api_routers"),
)


class CoreLink(Link):
    """A link to an engine core in this process."""

    def __init__(self, core) -> None:
        self.core = core

    def has_plugin(self, timeout):
        return True

    def rpc(self, method, arguments, timeout):
        return self.core.collective_rpc(method, timeout, tuple(arguments))

    def call(self, name, arguments, timeout):
        assert name == "reset_mm_cache"

    def plain_arguments(self, timeout):
        raise AssertionError("the engine has the plugin")

    generate = samples = plain_arguments


@pytest.fixture
def vllm_engine(sim, tag, monkeypatch):
    pytest.importorskip("vllm.device_allocator.sleep_mode_backend", reason="vLLM is not installed")
    from vllm_recipe import Engine

    tag.names.extend(("weights", "kv_cache", "runtime"))
    engine = Engine(monkeypatch)
    engine.core.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1
        ),
        model_config=SimpleNamespace(skip_tokenizer_init=True, enable_sleep_mode=True),
    )
    yield engine
    engine.close()


def released() -> set[str]:
    return {row.tag for row in memsaver.stats().tags if row.state == "paused"}


def test_a_controller_sleeps_and_wakes_in_stages(vllm_engine):
    link = CoreLink(vllm_engine.core)
    assert link.arguments(10)["tp_size"] == 1
    control = SleepController(link)
    runner = vllm_engine.runner
    kept = runner.model.weight.clone()
    assert control.guarded and control.status is Status.AWAKE
    report = control.sleep()
    assert report.bytes > 8 * MIB and {"weights", "kv_cache"} <= released()
    assert control.status is Status.ASLEEP and vllm_engine.core.is_sleeping()
    with control.staged_wake():
        assert control.status is Status.WEIGHTS_ONLY and torch.equal(runner.model.weight, kept)
    assert control.status is Status.AWAKE and not vllm_engine.core.is_sleeping()


def test_tags_sleep_independently(vllm_engine):
    core, control = vllm_engine.core, SleepController(CoreLink(vllm_engine.core))
    kept = vllm_engine.runner.model.weight.clone()
    for tag, other in (("kv_cache", "weights"), ("weights", "kv_cache")):
        control.sleep(tag)
        assert control.released == {tag} and core.model_executor.sleeping_tags == {tag}
        control.sleep(other)
        assert control.status is Status.ASLEEP
        control.wake_up(tag)
        assert control.released == {other} and core.is_sleeping()
        control.wake_up()
        assert control.status is Status.AWAKE and not core.is_sleeping() and not released()
    assert torch.equal(vllm_engine.runner.model.weight, kept)
    control.sleep("kv_cache")
    core.wake_up()  # another client
    assert control.refresh() is Status.AWAKE


def test_level_2_discards_the_weights_and_keeps_the_buffers(vllm_engine):
    control = SleepController(CoreLink(vllm_engine.core), level=2)
    for tags in (None, "weights"):
        vllm_engine.runner.model.weight.data.fill_(1)
        control.sleep(tags)
        control.wake_up()
        assert not vllm_engine.runner.model.weight.any()
        assert torch.equal(vllm_engine.runner.model.cos_sin_cache, torch.arange(64.0))


@pytest.mark.parametrize("tags", [None, "weights", "kv_cache"])
def test_a_wake_up_without_memory_leaves_the_engine_asleep(sim, vllm_engine, tags):
    control = SleepController(CoreLink(vllm_engine.core))
    control.sleep(tags)
    before = control.released
    free, _ = memsaver.device_memory(0)
    sim.occupy(free - MIB)
    with pytest.raises(memsaver.OutOfDeviceMemoryError) as caught:
        control.wake_up()
    assert caught.value.needed > caught.value.free
    assert control.released == before and vllm_engine.core.is_sleeping()
    sim.occupy(0)
    control.wake_up()
    assert control.status is Status.AWAKE


@pytest.mark.parametrize("tags", [None, "weights"])
def test_a_sleep_without_host_memory_leaves_the_engine_awake(sim, vllm_engine, tags):
    control = SleepController(CoreLink(vllm_engine.core))
    kept = vllm_engine.runner.model.weight.clone()
    sim.host_limit(1 << 16)
    with pytest.raises(memsaver.OutOfHostMemoryError):
        control.sleep(tags)
    assert control.status is Status.AWAKE and not vllm_engine.core.is_scheduler_paused()
    assert torch.equal(vllm_engine.runner.model.weight, kept)


def test_a_busy_engine_does_not_sleep(vllm_engine):
    link = CoreLink(vllm_engine.core)
    vllm_engine.core.scheduler.running.append(object())
    [answer] = link.rpc(protocol.RELEASE, [["weights"], 1], 10)
    assert answer["failure"]["kind"] == "EngineBusyError" and not released()
    assert not link.states(10)[0].idle and not vllm_engine.core.is_scheduler_paused()
    assert error_of([]) is None


def test_buckets_are_loaded_into_the_model(vllm_engine):
    from vllm_workers import payload

    from memsaver.integrations.engine.weights.checks import RankCheck

    runner, link = vllm_engine.runner, CoreLink(vllm_engine.core)
    vllm_engine.worker.model_runner.reset_encoder_cache = lambda: None
    model = runner.model

    def load_weights(weights):
        for name, tensor in weights:
            dict(runner.model.named_parameters())[name].data.copy_(tensor)

    model.load_weights = load_weights
    new = {"weight": torch.rand(MIB)}
    text, _ = payload(new)
    bucket = {"layout": "whole", "payloads": [text], "timeout": 10.0}
    link.rpc(protocol.BEGIN, [], 10)
    [[row]] = link.rpc(protocol.LOAD, [bucket], 10)
    assert RankCheck.from_fields(row).failure is None
    link.rpc(protocol.END, [], 10)
    assert torch.equal(model.weight, new["weight"])
    vllm_engine.core.collective_rpc("sleep", kwargs={"level": 1})
    [[row]] = link.rpc(protocol.LOAD, [bucket], 10)
    assert RankCheck.from_fields(row).failure.kind == "InvalidStateError"
    vllm_engine.core.collective_rpc("wake_up", kwargs={"tags": None})
    del model.load_weights, load_weights, model


# --- layerwise reload -----------------------------------------------------------------------------


def models():
    """Return the class of a model whose layers vLLM's reload converts, and its checkpoint."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    class Doubling(QuantizeMethodBase):
        def create_weights(self, layer, *weight_args, **extra_weight_attrs):
            raise AssertionError("not needed")

        def apply(self, layer, *args, **kwargs):
            raise AssertionError("not needed")

        def process_weights_after_loading(self, layer):
            layer.weight.data.mul_(2)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant_method = Doubling()
            self.weight = torch.nn.Parameter(torch.zeros(3 * 8, 8), requires_grad=False)
            self.weight.weight_loader = self.load

        def load(self, param, loaded_weight, shard):
            assert loaded_weight.shape == (8, 8), f"a tensor of {tuple(loaded_weight.shape)}"
            param.data.narrow(0, 8 * "qkv".index(shard), 8).copy_(loaded_weight)

    class Converted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Layer(), Layer()

        def load_weights(self, weights):
            for name, tensor in weights:
                layer, shard = name.split(".")
                param = getattr(self, layer).weight
                param.weight_loader(param, tensor, shard)

    names = [f"{layer}.{shard}" for layer in ("one", "other") for shard in "qkv"]
    return Converted, {name: torch.rand(8, 8) for name in names}


def recorded(model):
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    record_metadata_for_reloading(model)
    return model


@pytest.mark.parametrize("step", [1, 4, 6])
def test_a_layerwise_reload_outlives_the_memory_of_its_buckets(step):
    pytest.importorskip("vllm.model_executor.model_loader.reload", reason="vLLM")
    kind, checkpoint = models()
    model = recorded(kind())
    assert is_converted(model)
    addresses = [param.data_ptr() for param in model.parameters()]
    reload = LayerwiseReload(model, SimpleNamespace(dtype=torch.float32))
    named = list(checkpoint.items())
    for at in range(0, len(named), step):
        bucket = [(name, tensor.clone()) for name, tensor in named[at : at + step]]
        reload.load(bucket)
        for _, tensor in bucket:
            tensor.fill_(-1)  # the sender's next bucket
    reload.end(failed=False)
    assert [param.data_ptr() for param in model.parameters()] == addresses
    for name, tensor in checkpoint.items():
        layer, shard = name.split(".")
        held = getattr(model, layer).weight.narrow(0, 8 * "qkv".index(shard), 8)
        assert torch.equal(held, 2 * tensor)


def test_a_failed_reload_leaves_incomplete_layers_their_old_weights():
    pytest.importorskip("vllm.model_executor.model_loader.reload", reason="vLLM")
    kind, checkpoint = models()
    model = recorded(kind())
    model.one.weight.data.fill_(5)
    reload = LayerwiseReload(model, SimpleNamespace(dtype=torch.float32))
    reload.load([("one.q", checkpoint["one.q"])])
    with pytest.raises(AssertionError, match="a tensor of"):
        reload.load([("one.k", torch.zeros(2, 2))])
    reload.end(failed=True)
    assert torch.equal(model.one.weight, torch.full((24, 8), 5.0))
    again = LayerwiseReload(model, SimpleNamespace(dtype=torch.float32))
    again.load(list(checkpoint.items()))
    again.end(failed=False)
    assert torch.equal(model.one.weight[:8], 2 * checkpoint["one.q"])


def test_the_layers_whose_weights_stay_as_loaded_are_vllms(vllm_engine):
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    model = torch.nn.Module()
    for number, method in enumerate((UnquantizedLinearMethod, UnquantizedEmbeddingMethod)):
        layer = torch.nn.Module()
        layer.quant_method = method.__new__(method)
        model.add_module(str(number), layer)
    attention = torch.nn.Module()
    attention.__class__ = type("Attention", (Attention,), {})
    model.add_module("attention", attention)
    assert not is_converted(model)


@pytest.mark.parametrize("infix", ["", ".base_layer"])
def test_layers_that_lora_wraps_are_loaded_by_the_names_of_the_checkpoint(vllm_engine, infix):
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.utils import AutoWeightsLoader
    from vllm_workers import Worker

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = BaseLayerWithLoRA()
            self.proj.base_layer = torch.nn.Linear(8, 8).requires_grad_(False)
            self.norm = torch.nn.LayerNorm(8).requires_grad_(False)

        def load_weights(self, weights):
            return AutoWeightsLoader(self).load_weights(weights)

    model = Model()
    new = {f"proj{infix}.weight": torch.rand(8, 8), "norm.weight": torch.rand(8)}
    check = Worker(model).load(new)
    assert check.failure is None and check.received == check.held == 2 and not check.unused
    assert torch.equal(model.proj.base_layer.weight, new[f"proj{infix}.weight"])
    assert "self.lora_base_layer_prefix" in inspect.getsource(RoutedExperts.__init__)


# --- clients --------------------------------------------------------------------------------------


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
    """An engine client that records its calls."""

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
    """Return a link to a server with vLLM's own routes, and its engine client."""
    pytest.importorskip("vllm.entrypoints.serve.dev.rpc.api_router", reason="vLLM")
    import uvicorn
    from fastapi import FastAPI

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
