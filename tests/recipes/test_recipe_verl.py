"""Tests verl's own code, unmodified, with an SGLang whose memory memsaver manages.

verl's calls to an engine are unmodified: the client in the workers of its trainer, the server's
methods in its Ray actor, and SGLang's start arguments. The parts that require a GPU or Ray are
fakes.
"""

from __future__ import annotations

import asyncio
from types import MethodType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
from framework_rounds import MAPPED, ONLY_WEIGHTS, check_repeated, check_stages, states
from installed import needs, needs_sglang
from sleeping_manager import choose

import memsaver
from memsaver.integrations.engine.errors import EngineAsleepError

pytestmark = pytest.mark.recipes

BOTH = ["kv_cache", "weights"]


@pytest.fixture(scope="module", autouse=True)
def verl():
    needs_sglang()  # first: transformers looks for the packages that it replaces only once
    needs("verl.workers.rollout.sglang_rollout", "pip install verl")
    import verl

    if [int(part) for part in verl.__version__.split(".")[:2]] < [0, 9]:
        pytest.skip(f"verl {verl.__version__} is older than 0.9")
    return verl


class Remote:
    """A method of a fake Ray actor, whose calls are awaited."""

    def __init__(self, method) -> None:
        self._method = method

    async def remote(self, *args):
        return self._method(*args)


def rollout_config(**options):
    from verl.workers.config import RolloutConfig

    return RolloutConfig(name="sglang", tensor_model_parallel_size=1, **options)


def model_config():
    return SimpleNamespace(
        local_path="none",
        trust_remote_code=False,
        lora={},
        lora_rank=0,
        hf_config=SimpleNamespace(max_position_embeddings=4096),
        get=lambda name, default=None: default,
    )


@pytest.fixture
def rollout(engine, monkeypatch):
    """Return verl's engine client, created in the same way as in a trainer's worker."""
    import ray
    from torch.distributed.device_mesh import init_device_mesh
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")
    engine.steps = []
    actor = SimpleNamespace(
        get_server_address=Remote(lambda: (engine.host, engine.port)),
        set_global_steps=Remote(engine.steps.append),
    )
    monkeypatch.setattr(ray, "get_actor", lambda name: actor)
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp"))
    return ServerAdapter(rollout_config(), model_config(), mesh)


def test_the_client_releases_memory_and_resumes_it_in_stages(rollout, engine, sim):
    check_stages(
        engine,
        sim,
        lambda: asyncio.run(rollout.release()),
        lambda: asyncio.run(rollout.resume(["weights"])),
        lambda: asyncio.run(rollout.resume(["kv_cache"])),
    )


def test_repeated_requests_are_no_error(rollout, engine):
    def resume(*tags):
        return lambda: asyncio.run(rollout.resume(list(tags)))

    def release():
        asyncio.run(rollout.release())

    calls = (resume("weights"), resume("weights"), resume(*BOTH), resume("kv_cache"))
    check_repeated(engine, resume(*BOTH), release, release, *calls)


def test_a_resume_without_room_is_an_error_and_can_be_repeated(rollout, engine, sim):
    aiohttp = pytest.importorskip("aiohttp")
    asyncio.run(rollout.release())
    sim.occupy(memsaver.device_memory(0)[0] - (6 << 20))  # the trainer's
    asyncio.run(rollout.resume(["weights"]))
    with pytest.raises(aiohttp.ClientResponseError, match="400"):
        asyncio.run(rollout.resume(["kv_cache"]))
    assert states() == ONLY_WEIGHTS
    sim.occupy(0)
    asyncio.run(rollout.resume(["kv_cache"]))
    assert engine.scheduler.weights.is_intact() and engine.scheduler.kv_cache.is_zero()


def test_a_busy_engine_keeps_its_memory(rollout, engine):
    aiohttp = pytest.importorskip("aiohttp")
    engine.scheduler.running = 1
    with pytest.raises(aiohttp.ClientResponseError, match="400"):
        asyncio.run(rollout.release())
    assert states() == MAPPED
    engine.scheduler.running = 0
    asyncio.run(rollout.release())
    asyncio.run(rollout.resume(BOTH))


@pytest.fixture
def worker(rollout, monkeypatch):
    """Return verl's own colocated worker of a trainer whose model has no tensors.

    `worker.seen` contains the tags' states at two times: when the weights are sent, and when the
    trainer's copy is released.
    """
    from verl.workers import engine_workers
    from verl.workers.engine_workers import ActorRolloutRefWorker

    def weights():
        made.seen.append(states())
        yield from ()

    device = SimpleNamespace(empty_cache=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(engine_workers, "get_torch_device", lambda: device)
    monkeypatch.setattr(engine_workers, "set_expandable_segments", lambda enable: None)
    monkeypatch.setattr(engine_workers, "log_gpu_memory_usage", lambda *_, **__: None)
    made = object.__new__(ActorRolloutRefWorker)
    made.config, made.seen = SimpleNamespace(rollout=rollout.config), []
    made.rollout, made.layered_summon, made.peft_merge = rollout, False, False
    made.actor = SimpleNamespace(
        engine=SimpleNamespace(
            is_param_offload_enabled=True,
            get_per_tensor_param=lambda **_: (weights(), None),
            to=lambda *_, **__: made.seen.append(states()),
        )
    )
    return made


def test_a_step_of_the_trainer_updates_weights_before_the_cache_is_back(worker, rollout, engine):
    asyncio.run(rollout.release())
    asyncio.run(worker.update_weights(global_steps=3, mode="naive"))
    assert worker.seen == [{"kv_cache": "paused", "weights": "mapped"}] * 2
    assert states() == MAPPED and engine.steps == [3]


@pytest.mark.parametrize("where", ["get_per_tensor_param", "to"])
def test_a_step_that_raises_can_be_followed_by_others(worker, rollout, engine, monkeypatch, where):
    def broken(*_, **__):
        raise ValueError("the step is broken")

    asyncio.run(rollout.release())
    with monkeypatch.context() as patch:
        patch.setattr(worker.actor.engine, where, broken)
        with pytest.raises(ValueError, match="is broken"):
            asyncio.run(worker.update_weights(global_steps=3, mode="naive"))
    assert states()["kv_cache"] == "paused"
    for step in (4, 5):
        asyncio.run(rollout.release())
        assert states() == {"kv_cache": "paused", "weights": "paused"}
        asyncio.run(worker.update_weights(global_steps=step, mode="naive"))
        assert states() == MAPPED
        assert engine.scheduler.weights.is_intact() and engine.scheduler.kv_cache.is_zero()
    assert engine.steps[-2:] == [4, 5]


@pytest.fixture
def server(engine):
    """Return verl's Ray actor with the engine's tokenizer manager."""
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    server = object.__new__(SGLangHttpServer)
    server.config, server.model_config = rollout_config(), model_config()
    server.node_rank, server.tokenizer_manager = 0, engine.tokenizer
    return server


@pytest.mark.parametrize("mode", ["HYBRID", "COLOCATED", "STANDALONE"])
def test_the_server_sleeps_and_wakes_in_every_mode(server, engine, sim, mode):
    from verl.workers.rollout.replica import RolloutMode

    server.rollout_mode = RolloutMode[mode]
    kept = "mapped" if mode == "STANDALONE" else "paused"
    for _ in range(2):
        engine.run(server.sleep())
        assert states() == {"kv_cache": "paused", "weights": kept}
        if mode == "HYBRID":  # the trainer's workers wake it
            with pytest.raises(ValueError, match="HYBRID"):
                engine.run(server.wake_up())
            engine.run(engine.tokenizer.resume_memory_occupation(request_for(BOTH)))
        else:
            engine.run(server.wake_up())
        assert engine.scheduler.weights.is_intact() and engine.scheduler.kv_cache.is_zero()


def test_the_server_releases_only_the_cache(server, engine):
    engine.run(server.release_kv_cache())
    assert states() == ONLY_WEIGHTS
    engine.run(server.resume_kv_cache())
    assert engine.scheduler.kv_cache.is_zero()


@pytest.fixture
def generating(server, engine):
    """Return verl's Ray actor, whose generations run SGLang's own code up to the scheduler.

    The request is not tokenized, and the scheduler's answer contains the numbers of the mapped
    tags.
    """
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from verl.workers.rollout.replica import RolloutMode

    async def nothing(*_):
        return SimpleNamespace(input_ids=[])

    async def answer(obj, request):
        mapped = [number for number, tag in enumerate(BOTH) if states()[tag] == "mapped"]
        yield {"output_ids": mapped, "meta_info": {"finish_reason": {"type": "length"}}}

    tokenizer = engine.tokenizer
    tokenizer.server_args.enable_memory_saver = True
    tokenizer.server_args.enable_weights_cpu_backup = True
    tokenizer.generate_request = MethodType(TokenizerManager.generate_request, tokenizer)
    tokenizer.rid_to_state, tokenizer.tokenizer = MagicMock(), None
    tokenizer._tokenize_one_request = tokenizer._validate_and_resolve_lora = nothing
    tokenizer._wait_one_response = answer
    for name in (
        "_discard_pending_req_states",
        "_init_req_state",
        "_req_stats_init",
        "_send_one_request",
        "_set_default_priority",
        "request_logger",
    ):
        setattr(tokenizer, name, MagicMock())
    server.config.max_model_len = 4096
    server.rollout_mode, server.replica_rank = RolloutMode.COLOCATED, 0
    server.global_steps, server._disaggregation_role = 0, "null"
    return server


@pytest.mark.parametrize("when", ["refuse", "wait", "wake"])
def test_a_generation_on_a_sleeping_server_follows_the_policy(
    generating, engine, monkeypatch, when
):
    choose(monkeypatch, when, seconds=20)

    def generate():
        request = generating.generate([1, 2], {"max_new_tokens": 2}, "r")
        return asyncio.run_coroutine_threadsafe(request, engine.loop)

    assert generate().result(30).token_ids == [0, 1]
    engine.run(generating.sleep())
    answer = generate()
    if when == "refuse":
        with pytest.raises(EngineAsleepError, match="cannot generate"):
            answer.result(30)
    elif when == "wait":
        with pytest.raises(TimeoutError):
            answer.result(0.3)
    if when != "wake":
        assert states() == {"kv_cache": "paused", "weights": "paused"}
        engine.run(generating.wake_up())
    if when != "refuse":
        assert answer.result(30).token_ids == [0, 1]
    assert generate().result(30).token_ids == [0, 1] and engine.scheduler.weights.is_intact()


def request_for(tags):
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    return ResumeMemoryOccupationReqInput(tags=tags)


@pytest.mark.parametrize("mode, backup", [("HYBRID", True), ("STANDALONE", False)])
def test_it_starts_sglang_with_a_memory_saver(engine, server, monkeypatch, mode, backup):
    """The startup code of verl and SGLang runs unmodified up to the scheduler's process."""
    import sglang.srt.entrypoints.engine as sglang_engine
    from sglang.srt.entrypoints.http_server import Engine
    from sglang.srt.server_args import ServerArgs
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.sglang_rollout import async_sglang_server

    loaded, given = [], {}

    def launch(server_args, ports, run_scheduler):
        given.update(vars(server_args), run=run_scheduler)
        raise InterruptedError

    load = sglang_engine.load_plugins
    monkeypatch.setattr(sglang_engine, "load_plugins", lambda: loaded.append(load()))
    monkeypatch.setattr(Engine, "_launch_scheduler_processes", launch)
    monkeypatch.setattr(ServerArgs, "check_server_args", lambda args: None)  # needs a model
    monkeypatch.setattr(async_sglang_server, "_set_envs_and_config", lambda args: None)
    monkeypatch.setenv("SGLANG_BLOCK_NONZERO_RANK_CHILDREN", "0")
    server.rollout_mode, server.nnodes, server.base_gpu_id = RolloutMode[mode], 1, 0
    server._disaggregation_role = "null"
    with pytest.raises(InterruptedError):
        engine.run(server.launch_server())
    assert loaded  # installs memsaver here, and also in the scheduler's process
    assert given["run"].__module__ == "sglang.srt.managers.scheduler"
    assert given["enable_memory_saver"] is True
    assert given["enable_weights_cpu_backup"] is backup
