"""Tests the backend's contract with an engine object and a server of the fake SGLang."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import threading
import time
import types

import fake_sglang
import pytest
from sleep_worlds import started
from tasks import Task

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.engine.errors import EngineBusyError, EngineError, EngineTimeoutError
from memsaver.integrations.engine.interface import Broadcast, JoinRequest, SharedTensors, WeightLoad
from memsaver.integrations.rollout import Request, Sample
from memsaver.integrations.sglang.backend import backend_of
from memsaver.integrations.sglang.engines import connect
from memsaver.integrations.sglang.samples import sample_of

FOUR = {"max_new_tokens": 4}


@pytest.fixture
def make_world(monkeypatch):
    """Return a function that creates an engine: `make_world("local" | "server")` returns its
    manager and its address.
    """
    with contextlib.ExitStack() as cleanup:
        yield functools.partial(started, cleanup, monkeypatch)


@pytest.fixture(params=["local", "server"])
def kind(request):
    return request.param


@pytest.fixture
def world(make_world, kind):
    manager, target = make_world(kind)
    yield types.SimpleNamespace(
        manager=manager, target=target, backend=backend_of(target, timeout=30)
    )
    assert [scheduler.death for scheduler in manager.schedulers] == [None]


def expected(tokens, params, images=(), version="default"):
    made = fake_sglang.generated(tokens, params, images)
    logprobs = [-token / 1000 for token in made]
    return Sample(made, logprobs, "length", version)


# --- generating -----------------------------------------------------------------------------------


def test_samples_are_those_of_the_requests_in_order(world):
    requests = [
        Request([1, 2], {"max_new_tokens": 3}),
        Request([50], {"max_new_tokens": 1, "sampling_seed": 9}),
        Request([1, 2], {"max_new_tokens": 0}),
    ]
    found = world.backend.generate(requests, 30)
    assert found == [expected(r.input_ids, r.sampling_params) for r in requests]
    assert world.backend.generate([], 30) == []
    assert world.backend.tp_size == 1


def test_multimodal_prompts_pass_through(world):
    requests = [
        Request([1], FOUR),  # has no image, unlike later requests; SGLang uses its layout
        Request([2], FOUR, {"image_data": "https://host/cat.png"}),
        Request([3], FOUR, {"image_data": ["a.png", "b.png"]}),
    ]
    found = world.backend.generate(requests, 30)
    assert [sample.token_ids[0] for sample in found] == [1, 2 + 100, 3 + 200]
    with pytest.raises(ConfigError, match="smell_data"):
        world.backend.generate([Request([1], FOUR, {"smell_data": 1})], 30)


def test_a_server_accepts_only_json_arguments(make_world):
    _, url = make_world("server")
    with pytest.raises(ConfigError, match="base64"):
        backend_of(url).generate([Request([1], FOUR, {"image_data": object()})], 30)


def test_a_request_that_the_engine_rejects_is_an_error_with_its_reason(world):
    bad = Request([1], {"max_new_tokens": 9000})
    with pytest.raises(EngineError, match="context length"):
        world.backend.generate([Request([1], FOUR), bad], 30)
    assert world.backend.generate([Request([1], FOUR)], 30) == [expected([1], FOUR)]


def test_a_generation_that_takes_too_long_is_aborted(world):
    world.manager.generate_seconds = 60
    start = time.monotonic()
    with pytest.raises(EngineTimeoutError):
        world.backend.generate([Request([1], FOUR), Request([2], FOUR)], 0.3)
    assert time.monotonic() - start < 6
    assert len(world.manager.aborted_rids) == 2
    world.manager.generate_seconds = 0
    assert world.backend.generate([Request([1], FOUR)], 30) == [expected([1], FOUR)]
    world.backend.control.sleep(wait_idle=True)  # no requests are in flight


def test_a_generation_and_a_sleep_keep_out_of_each_others_way(world, wait_until):
    world.manager.generate_seconds = 60
    generation = Task(world.backend.generate, [Request([1], FOUR)], 30)
    wait_until(lambda: world.manager.schedulers[0].running)
    with pytest.raises(EngineBusyError):
        world.backend.control.sleep()
    threading.Timer(0.3, setattr, (world.manager, "finishes", True)).start()
    world.backend.control.sleep(wait_idle=True)
    assert generation.result() == [expected([1], FOUR)]
    with pytest.raises(InvalidStateError, match="wake it up"):
        world.backend.generate([Request([1], FOUR)], 30)
    world.backend.control.wake_up()
    assert world.backend.generate([Request([1], FOUR)], 30) == [expected([1], FOUR)]


# --- a pause of the generation --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_requests_that_come_in_a_pause_wait_for_its_end(world, mode):
    world.backend.pause_generation(mode, 30)
    assert world.manager.pause_mode == mode
    generation = Task(world.backend.generate, [Request([1], FOUR)], 30)
    time.sleep(0.2)
    assert generation.is_alive()
    world.backend.continue_generation(30)
    assert generation.result(30) == [expected([1], FOUR)]


def test_a_mode_of_pausing_that_does_not_exist(world):
    with pytest.raises(ConfigError, match="in_place"):
        world.backend.pause_generation("gently", 30)
    assert world.manager.pause_mode == ""


# --- weights --------------------------------------------------------------------------------------


def load(backend, payloads, version=None):
    tensors = SharedTensors(tuple(payloads), "engine")
    backend.load_weights(WeightLoad(tensors, 30, flush_cache=True, weight_version=version))


def test_tensors_are_loaded_with_a_version_that_samples_have(world):
    load(world.backend, ["bucket"], "step-7")
    (request,) = world.manager.loaded
    assert request.serialized_named_tensors == ["bucket"] and request.load_format == "direct"
    assert request.flush_cache is True
    (sample,) = world.backend.generate([Request([1], FOUR)], 30)
    assert sample.weight_version == "step-7"


def test_rejected_tensors_are_errors(world):
    with pytest.raises(EngineError, match="the model does not have"):
        load(world.backend, ["bad"])
    with pytest.raises(ConfigError, match="one for each"):
        load(world.backend, ["a", "b"])
    world.backend.control.sleep("weights")
    with pytest.raises(InvalidStateError, match="weights"):
        load(world.backend, ["bucket"])
    world.backend.control.wake_up()
    assert world.manager.loaded == []


def test_tensors_that_a_group_broadcasts(world):
    backend = world.backend
    load = WeightLoad(
        Broadcast("trainer", ("w",), ("bfloat16",), ((2, 3),)), 30, weight_version="2"
    )
    with pytest.raises(EngineError, match="trainer"):
        backend.load_weights(load)
    backend.join_group(JoinRequest("trainer", "10.0.0.1", 2345, "nccl", 2), 30)
    joined = world.manager.groups["trainer"]
    assert (joined.master_address, joined.master_port) == ("10.0.0.1", 2345)
    assert (joined.rank_offset, joined.world_size, joined.backend) == (1, 2, "nccl")
    backend.load_weights(load)
    (request,) = world.manager.loaded
    assert (request.names, request.dtypes, request.shapes) == (["w"], ["bfloat16"], [[2, 3]])
    backend.leave_group("trainer", 30)
    with pytest.raises(EngineError, match="not known"):
        backend.leave_group("trainer", 30)


# --- unusable engines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "kind", "text"),
    [
        ("0.4.6.post5", ConfigError, r"0\.4\.6\.post5.*0\.5\.11 or newer"),
        *((version, EngineError, "no version") for version in (5, None, ["0.5.16"], {})),
    ],
)
def test_a_server_of_another_version_or_without_one(make_world, version, kind, text):
    manager, url = make_world("server")
    manager.version = version
    with pytest.raises(kind, match=text):
        backend_of(url)


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "dp_size"])
@pytest.mark.parametrize("value", ["2", 2.5, -1, [], True, 1 << 70])
def test_an_invalid_number_of_ranks_is_an_engine_error(make_world, kind, name, value):
    manager, target = make_world(kind)
    setattr(manager.server_args, name, value)
    with pytest.raises(EngineError, match=name):
        backend_of(target)


def test_a_link_is_used_as_it_is(make_world, kind):
    _, target = make_world(kind)
    assert backend_of(connect(target)).tp_size == 1


def test_texts_are_prompts_for_an_engine_with_a_tokenizer(make_world):
    manager, engine = make_world("local")
    texts = [Request([], FOUR, {"image_data": "a.png"}, "hi"), Request([], FOUR, None, "ho")]
    with pytest.raises(ConfigError, match="skip_tokenizer_init=False"):
        backend_of(engine).generate(texts, 30)
    manager.server_args.skip_tokenizer_init = False
    backend = backend_of(engine)
    found = backend.generate(texts, 30)
    assert found == [expected(b"hi", FOUR, ["a.png"]), expected(b"ho", FOUR)]
    assert backend.generate([Request([1], FOUR)], 30) == [expected([1], FOUR)]
    with pytest.raises(ConfigError, match="only one kind"):
        backend.generate([*texts, Request([1], FOUR)], 30)


@pytest.mark.parametrize("given", ["dp_size=2", "pp_size=4"])
def test_ranks_that_would_get_no_weights(make_world, kind, given):
    manager, target = make_world(kind)
    name, number = given.split("=")
    setattr(manager.server_args, name, int(number))
    backend = backend_of(target)
    backend.generate([Request([1], FOUR)], 30)
    for call in (
        lambda: backend.begin_update(30),
        lambda: backend.join_group(JoinRequest("g", "127.0.0.1", 9, "gloo", 2), 30),
    ):
        with pytest.raises(ConfigError, match=given):
            call()
    # A plugin that gives all ranks their own contents.
    state = {"scheduler": "a", "released": [], "idle": True, "update_ranks": int(number)}

    async def states():
        return [{"memsaver": state}]

    manager.get_internal_state = states
    backend = backend_of(target)
    assert backend.tp_size == int(number)
    backend.begin_update(30)
    state["update_ranks"] = 1
    with pytest.raises(ConfigError, match=given):
        backend.begin_update(30)
    manager.server_args.enable_dp_attention = True
    if name == "dp_size":
        backend_of(target).begin_update(30)


def test_a_dead_scheduler_is_a_timeout(make_world, kind):
    manager, target = make_world(kind)
    backend = backend_of(target)
    manager.schedulers[0].death = RuntimeError("killed")
    with pytest.raises(EngineTimeoutError):
        backend.generate([Request([1], FOUR)], 0.3)


def test_a_dead_process_of_a_local_engine_is_seen_at_once(make_world):
    manager, engine = make_world("local")
    backend = backend_of(engine)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    manager._subprocess_watchdog = types.SimpleNamespace(_processes=[process])
    manager.generate_seconds = 60
    generation = Task(backend.generate, [Request([1], FOUR)], 30)
    time.sleep(0.3)
    assert generation.is_alive()
    killed = time.monotonic()
    process.kill()
    with pytest.raises(EngineError, match=f"its process {process.pid} exited with status -9"):
        generation.result(20)
    assert time.monotonic() - killed < 10


def test_outputs_that_are_not_sglangs():
    good = {
        "output_ids": [5, 6],
        "meta_info": {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [[-1, 5, None]] * 2,
        },
    }
    assert sample_of(good) == Sample([5, 6], [-1.0, -1.0], "stop", None)
    without = {**good, "meta_info": {"finish_reason": {"type": "stop"}}}
    assert sample_of(without).logprobs is None
    assert sample_of({**without, "output_ids": []}).logprobs == []
    short = {**good, "output_ids": [5, 6, 7]}
    with pytest.raises(EngineError, match="2 log-probabilities for 3 tokens"):
        sample_of(short)
    aborted = {**short, "meta_info": {**good["meta_info"], "finish_reason": {"type": "abort"}}}
    assert sample_of(aborted).token_ids == [5, 6]
    meta = good["meta_info"]
    for bad in (
        {},
        {"output_ids": [1]},
        {"output_ids": "x", "meta_info": {}},
        {"output_ids": ["5", "6"], "meta_info": meta},
        {"output_ids": [5.0, 6.5], "meta_info": meta},
        {"output_ids": [True, False], "meta_info": meta},
        {"output_ids": [1 << 70, 5], "meta_info": meta},
        {"output_ids": [5, 6], "meta_info": {"output_token_logprobs": [["-1"], ["-2"]]}},
        {"output_ids": [5, 6], "meta_info": {"output_token_logprobs": [[True], [False]]}},
        {"output_ids": [5, 6], "meta_info": {"output_token_logprobs": 5}},
        {"output_ids": [5, 6], "meta_info": "meta"},
        {"output_ids": [5, 6], "meta_info": {"finish_reason": {"kind": "stop"}}},
        "text",
        None,
        5,
        [],
    ):
        with pytest.raises(EngineError, match="does not have SGLang's format"):
            sample_of(bad)
