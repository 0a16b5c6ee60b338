"""Tests verified, bucketed, plain and converted weight loads in vLLM's workers."""

from __future__ import annotations

import base64
import pickle
import sys
from types import SimpleNamespace

import pytest

from memsaver.integrations.vllm import weight_loads
from memsaver.integrations.vllm.protocol import BEGIN, END, LOAD

torch = pytest.importorskip("torch")

import rank_processes  # noqa: E402
from repository import TESTS  # noqa: E402
from vllm_workers import Worker, buckets, contents, equal  # noqa: E402
from weight_buckets import payload  # noqa: E402


@pytest.fixture
def tiny(monkeypatch):
    """Return the fake vLLM's module with a small model for this test."""
    monkeypatch.syspath_prepend(str(TESTS / "fixtures" / "vllm_engine"))
    from vllm.model_executor.models import tiny

    yield tiny
    for name in [one for one in sys.modules if one.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def loaded(tiny, seed, **model):
    """Return the contents of a model that has loaded a checkpoint as vLLM does at startup."""
    made = tiny.Tiny(**model)
    made.load_weights(tiny.checkpoint(seed).items())
    if model.get("converts"):
        for layer in made.modules():
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
    return made


@pytest.mark.parametrize("end", [[], [BEGIN]], ids=["complete", "abandoned"])
def test_weights_are_loaded_and_converted_with_vllms_configuration_set(tiny, monkeypatch, end):
    from vllm.config import get_current_vllm_config_or_none

    model, seen = loaded(tiny, 1, converts=True), {}
    worker = Worker(model)

    def records(owner, name):
        original = getattr(owner, name)

        def record(*arguments):
            seen.setdefault(name, []).append(get_current_vllm_config_or_none())
            return original(*arguments)

        monkeypatch.setattr(owner, name, record)

    records(model, "load_weights")
    records(
        next(one.quant_method for one in model.modules() if hasattr(one, "quant_method")),
        "process_weights_after_loading",
    )
    worker.call(BEGIN)
    assert worker.load(tiny.checkpoint(2)).failure is None
    for call in [*end, END]:
        worker.call(call)
    assert set(seen) == {"load_weights", "process_weights_after_loading"}
    assert all(one is worker.vllm_config for found in seen.values() for one in found)
    assert get_current_vllm_config_or_none() is None


class BaseLayerWithLoRA(torch.nn.Module):
    """A wrapper of a layer, like those in an engine with LoRA."""

    def __init__(self, base_layer) -> None:
        super().__init__()
        self.base_layer = base_layer


@pytest.mark.parametrize("infix", ["", ".base_layer"])
@pytest.mark.parametrize("converts", [False, True])
def test_layers_that_lora_wraps_are_loaded_by_the_names_of_the_checkpoint(tiny, converts, infix):
    model, like = loaded(tiny, 1, converts=converts), loaded(tiny, 2, converts=converts)
    for made in (model, like):
        made.qkv_0, made.qkv_1 = BaseLayerWithLoRA(made.qkv_0), BaseLayerWithLoRA(made.qkv_1)
    worker, wrappers = Worker(model), [model.qkv_0, model.qkv_1]
    worker.call(BEGIN)
    for bucket in buckets(tiny.checkpoint(2), 4):
        named = {name.replace(".weight", f"{infix}.weight"): t for name, t in bucket.items()}
        check = worker.load(named)
        assert check.received == len(bucket) and not check.unused and check.failure is None
        assert check.held == (0 if converts else len(bucket))
    assert worker.call(END).failure is None
    assert equal(contents(model), contents(like)) and wrappers == [model.qkv_0, model.qkv_1]
    wrong = {"layers.0.q.weight": torch.zeros(3, 3)}
    assert "a tensor of (3, 3)" in worker.load(wrong).failure.message
    assert wrappers == [model.qkv_0, model.qkv_1] and worker.call(END).failure is None
    own = {"qkv_0.weight": torch.ones(24, 8)}
    assert worker.load(own, "engine").held == 1
    assert bool((model.qkv_0.base_layer.weight == 1).all())


@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_converted_model_is_reloaded_layer_by_layer(tiny, count):
    model = loaded(tiny, 1, converts=True)
    worker = Worker(model)
    addresses = [param.data_ptr() for param in model.parameters()]
    worker.call(BEGIN)
    for bucket in buckets(tiny.checkpoint(2), count):
        check = worker.load(bucket)
        assert check.received == len(bucket) and check.held == 0 and not check.unused
        assert "converts" in check.unverified
    worker.call(END)
    assert equal(contents(model), contents(loaded(tiny, 2, converts=True)))
    assert [param.data_ptr() for param in model.parameters()] == addresses


def test_a_failed_reload_leaves_incomplete_layers_their_old_weights(tiny):
    model = loaded(tiny, 1, converts=True)
    worker, before = Worker(model), contents(model)
    new = tiny.checkpoint(2)
    worker.call(BEGIN)
    part = {name: new[name] for name in ("layers.0.norm.weight", "layers.0.q.weight")}
    assert worker.load(part).failure is None
    wrong = {"layers.0.k.weight": torch.zeros(3, 3)}
    assert "a tensor of (3, 3)" in worker.load(wrong).failure.message
    worker.call(END)
    after = contents(model)
    assert torch.equal(after["norm_0.weight"], new["layers.0.norm.weight"])
    assert equal(after, before | {"norm_0.weight": new["layers.0.norm.weight"]})
    worker.call(BEGIN)
    assert worker.load(new).failure is None
    worker.call(END)
    assert equal(contents(model), contents(loaded(tiny, 2, converts=True)))


def test_only_a_model_that_is_loaded_and_not_converted_maps_tensors(tiny):
    from memsaver._memory.sharing.wire import domain
    from memsaver.integrations.vllm.reload import domain_of

    workers = [Worker(loaded(tiny, 1, converts=converts)) for converts in (False, True)]
    assert [domain_of(worker) for worker in workers] == [domain(), ""] != ["", ""]

    def get_model():
        raise ValueError("Cannot get model before model has been initialized")

    workers[0].model_runner.get_model = get_model
    assert domain_of(workers[0]) == ""


def test_an_update_that_was_not_ended_is_abandoned(tiny):
    model = loaded(tiny, 1, converts=True)
    worker, new = Worker(model), tiny.checkpoint(2)
    worker.call(BEGIN)
    worker.load({"layers.0.q.weight": new["layers.0.q.weight"]})
    worker.call(BEGIN)
    worker.load(new)
    worker.call(END)
    worker.call(END)  # does nothing
    assert equal(contents(model), contents(loaded(tiny, 2, converts=True)))


@pytest.mark.parametrize("converts", [False, True])
def test_an_update_of_released_weights_is_ended_without_access_to_them(tiny, monkeypatch, converts):
    """The reload can be ended after a wake-up."""
    model = loaded(tiny, 1, converts=converts)
    worker, new = Worker(model), tiny.checkpoint(2)
    worker.call(BEGIN)
    first = "layers.0.q.weight"
    assert worker.load({first: new.pop(first)}).failure is None
    with monkeypatch.context() as asleep:
        allocator = SimpleNamespace(released=("weights",), losses=0)
        asleep.setattr(weight_loads, "installed_allocator", lambda: allocator)
        failure = worker.call(END).failure
    if converts:
        assert failure.kind == "InvalidStateError" and "wake the engine up" in failure.message
    else:
        assert failure is None
    assert worker.load(new).failure is None and worker.call(END).failure is None
    assert equal(contents(model), contents(loaded(tiny, 2, converts=converts)))


@pytest.mark.parametrize("converts", [False, True])
def test_an_update_whose_weights_a_sleep_discarded_fails(tiny, monkeypatch, converts):
    worker, new = Worker(loaded(tiny, 1, converts=converts)), tiny.checkpoint(2)
    allocator = SimpleNamespace(released=(), losses=1)
    monkeypatch.setattr(weight_loads, "installed_allocator", lambda: allocator)
    worker.call(BEGIN)
    assert worker.load(new).failure is None
    allocator.losses += 1
    failure = worker.call(END).failure
    assert failure.kind == "EngineError" and "send all of them again" in failure.message
    worker.call(BEGIN)
    assert worker.load(new).failure is None and worker.call(END).failure is None


@pytest.mark.parametrize("when", ["refuse", "wake"])
def test_an_engine_that_sleeps_during_an_update_is_not_damaged_by_its_end(run_vllm, when):
    run_vllm(
        f"""
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.interface import SharedTensors, WeightLoad
from memsaver.integrations.vllm.protocol import BEGIN, END, LOAD, fields_of
from weight_buckets import payload
llm = LLM(model="tiny-converted", enable_sleep_mode=True)
from vllm.model_executor.models.tiny import checkpoint
def call(method, *args):
    [[row]] = llm.collective_rpc(method, args=args)
    return row["failure"]
before = llm.generate(PROMPTS)
name = "layers.0.q.weight"
text, memory = payload({{name: checkpoint(2)[name]}})
assert call(BEGIN) is None
assert call(LOAD, fields_of(WeightLoad(SharedTensors((text,)), 10.0))) is None
llm.sleep()
if {when!r} == "refuse":
    error = refused(EngineAsleepError, call, END)
    assert error.tags == ("kv_cache", "weights") and "update its weights" in str(error)
    llm.wake_up()
assert call(END) is None
llm.wake_up()
assert len(llm.generate(PROMPTS)) == len(before)
llm.shutdown()
        """,
        VLLM_ENABLE_V1_MULTIPROCESSING=1,
        MEMSAVER_VLLM_ASLEEP=when,
    )


def test_tensors_in_the_engines_layout_are_written_unchanged(tiny):
    model = loaded(tiny, 1, converts=True)
    worker, new = Worker(model), contents(loaded(tiny, 2, converts=True))
    worker.call(BEGIN)
    check = worker.load(new, "engine")
    assert check.received == check.held == len(new) and not check.unverified
    worker.call(END)
    assert equal(contents(model), new)
    assert worker.load({"other": torch.ones(2)}, "engine").unused == ("other",)
    check = worker.load({"norm_0.weight": torch.ones(2)}, "engine")
    assert "has the shape (8,), but its tensor has (2,)" in check.failure.message


def test_a_text_that_is_no_bucket_is_rejected_and_runs_nothing(tiny, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    worker = Worker(loaded(tiny, 1))
    text = base64.b64encode(pickle.dumps([("a", Evil())])).decode()
    for fields in (
        {"layout": "whole", "payloads": [text], "timeout": 1.0},
        {"layout": "whole", "payloads": ["#"], "timeout": 1.0},
        {"layout": "other", "payloads": [], "timeout": 1.0},
        {"timeout": "long"},
        {"group_name": "g", "names": ["a"], "dtypes": [], "shapes": [], "timeout": 1.0},
        {"group_name": "g", "names": [], "dtypes": [], "shapes": [], "timeout": 1.0},
    ):
        check = worker.call(LOAD, fields)
        assert check.failure is not None and check.failure.kind in (
            "EngineError",
            "InvalidStateError",
        )
    assert not (tmp_path / "made").exists()


RANKS = """
import contextlib, pytest, torch.distributed as dist
from vllm.model_executor.models import tiny
from vllm_workers import Worker
from memsaver.integrations.engine.ranks import Group
from memsaver.integrations.engine.interface import Broadcast, WeightLoad
from memsaver.integrations.engine.weights.checks import RankCheck
from memsaver.integrations.vllm import weight_loads
from memsaver.integrations.vllm.protocol import BEGIN, END, LOAD, fields_of
dist.init_process_group("gloo")
rank = dist.get_rank()
worker = Worker(tiny.Tiny())
worker.parallel_config.world_size, worker._memsaver_group = 2, Group(dist.group.WORLD)
bucket = fields_of(WeightLoad(Broadcast("g", (), (), ()), 10.0))
for raised in (KeyboardInterrupt, SystemExit):
    def ends(*arguments, **named):
        if rank == 1:
            raise raised
        return []
    for owner, name, call, arguments in (
        (weight_loads, "_check_awake", BEGIN, ()),
        (weight_loads, "_arrived", LOAD, (bucket,)),
        (weight_loads._Update, "load", LOAD, (bucket,)),
        (weight_loads._Update, "end", END, ()),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, ends)
            if name != "_arrived":
                patch.setattr(weight_loads, "_arrived", lambda *_: [])
            with pytest.raises(raised) if rank == 1 else contextlib.nullcontext():
                rows = getattr(worker, call)(*arguments)
        if rank == 0:
            failures = [RankCheck.from_fields(row).failure for row in rows]
            assert [one and one.kind for one in failures] == [None, raised.__name__], (name, rows)
            assert rows[1]["host"] and rows[1]["pid"], rows
        for call in (END, BEGIN):
            assert [row["failure"] for row in getattr(worker, call)()] == [None, None]
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.timeout(120)
def test_an_interrupt_on_one_rank_is_an_answer_on_the_others_at_once(tmp_path):
    path = f"import sys; sys.path.insert(0, {str(TESTS / 'fixtures' / 'vllm_engine')!r})\n"
    said = rank_processes.run(path + RANKS, 2, tmp_path, timeout=80)
    assert all("fine" in text for text in said)


def test_a_checkpoint_of_another_format_counts_as_converted(tiny):
    from memsaver.integrations.vllm.reload import is_converted

    model = tiny.Tiny()
    assert not is_converted(model)
    attention = torch.nn.Module()
    attention.process_weights_after_loading = lambda dtype: None
    model.add_module("attention", attention)
    assert is_converted(model)
    attention.__class__ = type("Attention", (torch.nn.Module,), {})
    assert not is_converted(model)


def test_payloads_of_several_tensors_share_their_memory():
    from memsaver.integrations.engine.weights.payloads import named_tensors

    text, memory = payload({"a": torch.ones(4), "b": torch.zeros(2, 2, dtype=torch.bfloat16)})
    (_, one), (_, other) = named_tensors(text)
    memory.fill_(1)
    assert one.view(torch.uint8).tolist() == [1] * 16 and other.shape == (2, 2)
