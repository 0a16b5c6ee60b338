"""Tests that verl accepts the settings and the tokenizer of the benchmark for verl's trainer."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import sys
from types import SimpleNamespace

import pytest
from installed import needs, needs_sglang

pytestmark = pytest.mark.recipes


@pytest.fixture(autouse=True)
def verl():
    needs_sglang()  # first: transformers looks for the packages that it replaces only once
    needs("verl.trainer.main_ppo", "pip install verl")
    needs("hydra", "pip install verl")


def test_verl_accepts_the_settings(benchmark_module, tmp_path):
    """verl's own check passes. Each setting exists, because hydra rejects unknown names without
    "+".
    """
    import hydra
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    trainer = benchmark_module("verl_trainer")
    for gpus in (1, 2):
        settings = trainer.Settings(tmp_path, steps=5, gpus=gpus)
        given = [
            argument
            for argument in trainer.arguments(settings, tmp_path)
            if not argument.startswith("hydra.")
        ]
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose("ppo_trainer", overrides=given)
        validate_config(config, need_reference_policy(config), need_critic(config))
        assert config.trainer.use_v1 and config.trainer.v1.trainer_mode == "sync"
        assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == gpus


def test_verl_accepts_the_tokenizer_of_a_qwen3(benchmark_module):
    from verl.utils.tokenizer.continuous_token import QwenContinuousTokenBuilder

    model = benchmark_module("verl_model")
    tokenizer = model.tokenizer(8192)
    builder = QwenContinuousTokenBuilder(tokenizer)
    begin = 4 + 7 * model.PROMPT
    expected = [1, *range(begin, begin + model.PROMPT), 2, 3, 1]
    assert builder.build_initial_tokens(model.row(7)["prompt"]) == expected
    assert tokenizer.decode([5, 6]) == "t5 t6"


def test_verls_requests_are_recorded(benchmark_module, tmp_path, monkeypatch):
    watch = benchmark_module("verl_watch")
    monkeypatch.setenv(watch.FILE, str(tmp_path / "record"))
    for name in (watch.SERVER, watch.CLIENT):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [watch.Finder(), *sys.meta_path])
    server = importlib.import_module(watch.SERVER).SGLangHttpServer
    adapter = importlib.import_module(watch.CLIENT).AsyncHttpServerAdapter

    async def answer(self, endpoint, payload):
        return payload

    monkeypatch.setattr(adapter, "_make_async_request", answer)
    asleep = SimpleNamespace(node_rank=1)  # nothing to do on this node
    asyncio.run(server.sleep(asleep))
    client = adapter.__new__(adapter)
    assert asyncio.run(client.resume_memory_occupation(tags=["weights"])) == {"tags": ["weights"]}
    lines = [json.loads(line) for line in (tmp_path / "record").read_text().splitlines()]
    assert [(line["call"], line["tags"]) for line in lines] == [
        (watch.SLEEP, None),
        (watch.RESUME, ["weights"]),
    ]
    monkeypatch.undo()
    for name in (watch.SERVER, watch.CLIENT):
        sys.modules.pop(name, None)


def test_the_engines_start_returns_what_is_recorded(benchmark_module):
    watch = benchmark_module("verl_watch")
    engine = importlib.import_module(watch.ENGINE)
    assert isinstance(vars(engine.Engine)["_launch_subprocesses"], classmethod)
    fields = {field.name for field in dataclasses.fields(engine.SchedulerInitResult)}
    assert {"scheduler_infos", "all_child_pids"} <= fields
