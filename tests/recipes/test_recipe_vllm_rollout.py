"""Tests memsaver's calls to vLLM's own engine core, and vLLM's layerwise reload."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from looks import paused_tags

import memsaver
from memsaver.integrations.engine.messages import error_of
from memsaver.integrations.engine.status import Status
from memsaver.integrations.vllm import protocol
from memsaver.integrations.vllm.link import Link
from memsaver.integrations.vllm.reload import LayerwiseReload, is_converted
from memsaver.integrations.vllm.sleep import SleepController

pytestmark = pytest.mark.recipes

MIB = 1 << 20


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

    generate = samples = has_sleep_mode = plain_arguments


@pytest.fixture
def vllm_engine(vllm_engine):
    vllm_engine.core.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1
        ),
        model_config=SimpleNamespace(skip_tokenizer_init=True, enable_sleep_mode=True),
    )
    return vllm_engine


def test_a_controller_sleeps_and_wakes_in_stages(vllm_engine):
    link = CoreLink(vllm_engine.core)
    assert link.arguments(10)["tp_size"] == 1
    control = SleepController(link)
    runner = vllm_engine.runner
    kept = runner.model.weight.clone()
    assert control.guarded and control.status is Status.AWAKE
    report = control.sleep()
    assert report.bytes > 8 * MIB and {"weights", "kv_cache"} <= paused_tags()
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
        assert control.status is Status.AWAKE and not core.is_sleeping() and not paused_tags()
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


@pytest.mark.parametrize("tags", [None, "weights"])
def test_a_wake_up_need_not_restore_weights_that_an_update_rewrites(start_vllm, tags):
    engine = start_vllm(has_lora=True)
    control, runner = SleepController(CoreLink(engine.core)), engine.runner
    stack = runner.lora_manager.stack.fill_(3)
    for _ in range(2):
        control.sleep(tags)
        control.wake_up("weights", keep_weights=False)
        control.wake_up()
        assert control.status is Status.AWAKE and not engine.core.is_sleeping()
        assert not runner.model.weight.any() and (stack == 3).all()
        assert torch.equal(runner.model.cos_sin_cache, torch.arange(64.0))
        runner.model.weight.data.fill_(7)  # the update
        control.sleep(tags)
        control.wake_up()
        assert (runner.model.weight == 7).all()
        assert torch.equal(runner.model.cos_sin_cache, torch.arange(64.0))


def test_weights_beside_a_draft_model_are_kept(start_vllm):
    engine = start_vllm(has_draft=True)
    control, models = SleepController(CoreLink(engine.core)), engine.runner
    control.sleep(keep_weights=False)
    control.wake_up(keep_weights=False)
    for model in (models.model, models.draft):
        assert torch.equal(model.weight, torch.arange(MIB, dtype=torch.float32))


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
    assert answer["failure"]["kind"] == "EngineBusyError" and not paused_tags()
    assert not link.states(10)[0].idle and not vllm_engine.core.is_scheduler_paused()
    assert error_of([]) is None


def test_buckets_are_loaded_into_the_model(vllm_engine):
    from weight_buckets import payload

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
    """Return the class of a model whose layers vLLM's reload converts, and a checkpoint of the
    model.
    """
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
