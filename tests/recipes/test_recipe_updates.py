"""Tests weight updates with SGLang's own session, unpickler, selector and runners' updaters."""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from importing_process import importing_process, release_shared
from installed import needs_sglang
from weight_requests import payload, verification

import memsaver
from memsaver import simulator
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.interface import SharedTensors, WeightLoad
from memsaver.integrations.rollout.weights.payloads import mapped
from memsaver.integrations.sglang import SleepController, lost_weights
from memsaver.integrations.sglang.backend import backend_of

pytestmark = pytest.mark.recipes

LAYOUTS = {"whole": "flattened_bucket", "engine": "direct"}


def runner_of(model):
    """Return SGLang's own updater of a model, as part of a model runner."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    updater = WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=None,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=None,
        recapture_cuda_graph=None,
        get_model_runner=None,
    )
    return SimpleNamespace(model=model, tp_rank=0, weight_updater=updater)


@pytest.fixture
def scheduler(engine):
    """Return the engine's scheduler with SGLang's own components for weight updates."""
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.tp_worker import TpModelWorker

    if not hasattr(io_struct, "BeginWeightUpdateReqInput"):
        pytest.skip("this version of SGLang has no sessions of weight updates")
    scheduler = engine.scheduler
    runner = runner_of(scheduler.model)
    worker = SimpleNamespace(
        model_runner=runner,
        weight_update_runners=lambda: [("target", runner)],
        deserialize_own_rank=lambda data: TpModelWorker.deserialize_own_rank(worker, data),
    )
    scheduler.handlers.tp_worker = worker
    return scheduler


@pytest.fixture
def draft(scheduler):
    """Return a draft worker's model."""
    from recipe_engine import Model

    model = Model()
    model.draft = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    runner = runner_of(model)
    scheduler.handlers.draft_worker = SimpleNamespace(
        weight_update_runners=lambda: [("draft", runner)]
    )
    return model


@pytest.fixture
def backend(engine, scheduler):
    return backend_of(engine.url)


def load(backend, named, layout="whole", text=None):
    tensors = SharedTensors((text or payload(named, LAYOUTS[layout]),), layout, text is None)
    return backend.load_weights(WeightLoad(tensors, 30.0, verification=verification(named)))


@contextlib.contextmanager
def session(backend):
    backend.begin_update(30.0)
    yield
    backend.end_update(30.0)


def test_the_wrapper_of_a_layer_for_lora_has_the_expected_names():
    found = importlib.util.find_spec("sglang")
    if found is None:
        pytest.skip("SGLang is not installed")
    source = Path(found.origin).with_name("srt") / "lora" / "layers.py"  # its import needs triton
    assert {"class BaseLayerWithLoRA(nn.Module):", "self.base_layer: nn.Module = base_layer"} <= {
        line.strip() for line in source.read_text().splitlines()
    }


def new(value):
    return {"weight": torch.full((4,), value)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_session_loads_and_verifies_new_weights(backend, scheduler, layout):
    for value in (2.0, 3.0):
        with session(backend):
            (check,) = load(backend, new(value), layout)
        assert check.received == check.held == 1 and not check.unverified
        assert scheduler.model.weight.tolist() == [value] * 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_a_region_are_mapped_and_released(
    backend, scheduler, tag, options, wait_until, layout
):
    options(importer_seconds=5)
    name = tag("trainer")
    with memsaver.region(name, backup="host", shareable=True):
        weight = simulator.empty(4)
    assert backend.maps_regions(30.0)
    for value in (2.0, 3.0):
        named = {"weight": weight.fill_(value)}
        with session(backend):
            (check,) = load(backend, named, layout, mapped(list(named.items()), []))
        memsaver.pause(name)
        memsaver.resume(name)
        assert check.received == check.held == 1 and not check.unverified
        assert scheduler.model.weight.tolist() == [value] * 4
    del weight, named
    release_shared(wait_until)


def test_sglangs_serializer_sends_tensors_of_a_region_without_a_copy(
    sim, tag, options, wait_until, monkeypatch
):
    needs_sglang()
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    # SGLang replaces a GPU's number with its UUID in what it sends; torch has no GPU here.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    options(importer_seconds=10)
    name = tag("trainer")
    with memsaver.region(name, backup="host", shareable=True):
        weight = simulator.empty(8)
    monkey_patch_torch_reductions()
    named = [("half", weight[4:]), ("strided", weight[::2])]
    with importing_process() as engine:
        engine.do("import absent_packages; absent_packages.install()")
        engine.do("from sglang.srt.plugins import load_plugins; load_plugins()")
        engine.do("from sglang.srt.utils import MultiprocessingSerializer")
        for as_text in (False, True):
            weight.copy_(torch.arange(8.0))
            engine.load("y", MultiprocessingSerializer.serialize(named, output_str=as_text))
            engine.do("x = dict(MultiprocessingSerializer.deserialize(y))")
            assert engine.ask("x['half'].tolist()") == [4, 5, 6, 7]
            assert engine.ask("x['strided'].tolist()") == [0, 2, 4, 6]
            engine.do("x['strided'].add_(10)")
            assert weight.tolist() == [10, 1, 12, 3, 14, 5, 16, 7]
            weight[4] = -1
            assert engine.ask("x['half'][0].item()") == -1
            engine.forget()
            memsaver.pause(name)  # at once
            memsaver.resume(name)
    del weight, named
    release_shared(wait_until)


def test_weights_outside_a_session_are_rejected(backend, scheduler):
    with pytest.raises(EngineError, match="begin_weight_update"):
        load(backend, new(2.0))
    assert scheduler.model.weight.tolist() == [0.0] * 4
    with session(backend):
        load(backend, new(2.0))
    assert scheduler.model.weight.tolist() == [2.0] * 4


def test_a_sleeping_engine_takes_new_weights_before_its_cache_is_mapped(engine, backend, scheduler):
    controller = SleepController(engine.url)
    controller.sleep()
    with controller.staged_wake(), session(backend):
        load(backend, new(2.0))
        assert memsaver.state("kv_cache") == "paused"
    assert scheduler.model.weight.tolist() == [2.0] * 4 and scheduler.kv_cache.is_zero()


def test_a_failed_end_closes_the_session(backend, scheduler, monkeypatch):
    from sglang.srt.model_loader.loader import DefaultModelLoader

    def fail(*_):
        raise ValueError("no room for packed weights")

    backend.begin_update(30.0)
    with monkeypatch.context() as patch:
        patch.setattr(DefaultModelLoader, "postprocess_weights", fail)
        with pytest.raises(EngineError, match="no room for packed weights"):
            backend.end_update(30.0)
    with session(backend):
        load(backend, new(2.0))
    assert scheduler.model.weight.tolist() == [2.0] * 4


def test_discarded_weights_are_complete_at_the_end_of_a_whole_update(backend, scheduler):
    setattr(scheduler, lost_weights._ATTRIBUTE, True)
    for complete in (False, True):
        backend.begin_update(30.0)
        load(backend, new(2.0))
        assert lost_weights.are_lost(scheduler)
        backend.end_update(30.0, complete)
        assert lost_weights.are_lost(scheduler) is not complete


class Forbidden:
    def __reduce__(self):
        return eval, ("1 / 0",)


def test_a_payload_that_sglang_does_not_unpickle_is_an_error(backend, scheduler):
    text = base64.b64encode(pickle.dumps([("weight", Forbidden())])).decode()
    backend.begin_update(30.0)
    with pytest.raises(EngineError, match="eval"):
        backend.load_weights(WeightLoad(SharedTensors((text,), "engine"), 30.0))
    load(backend, new(2.0))
    backend.end_update(30.0)
    assert scheduler.model.weight.tolist() == [2.0] * 4


def test_weights_in_the_engines_layout_are_loaded_into_the_main_model_only(
    backend, scheduler, draft
):
    with session(backend):
        load(backend, new(2.0), "engine")
    assert scheduler.model.weight.tolist() == [2.0] * 4
    assert draft.weight.tolist() == [0.0] * 4


def test_a_draft_model_takes_its_weights_from_a_whole_bucket(backend, scheduler, draft):
    named = {**new(2.0), "draft": torch.tensor([5.0, 6.0])}
    with session(backend):
        (check,) = load(backend, named)
    assert check.unused == () and check.held == 2
    assert scheduler.model.weight.tolist() == [2.0] * 4
    assert draft.draft.tolist() == [5.0, 6.0]


@pytest.fixture
def cached(engine, scheduler):
    """Return a scheduler whose weights belong to SGLang's weight cache, which is a separate
    process.
    """
    from recipe_updater import published

    with published(weight_cache_mode="client"):
        yield scheduler


def test_cached_weights_are_neither_released_nor_changed(engine, cached, backend):
    controller = SleepController(engine.url)
    with pytest.raises(EngineError, match="weight-cache-mode client"):
        controller.sleep()
    assert controller.refresh().name == "AWAKE"
    assert {memsaver.state(tag) for tag in ("weights", "kv_cache")} == {"mapped"}
    assert cached.weights.is_intact()
    controller.sleep("kv_cache")
    controller.wake_up()
    backend.begin_update(30.0)
    with pytest.raises(EngineError, match="weight-cache-mode client"):
        load(backend, new(2.0))
    backend.end_update(30.0)
    assert cached.model.weight.tolist() == [0.0] * 4
