"""Tests that SGLang's own model runner loads a draft model into memory that a sleep keeps."""

from __future__ import annotations

import contextlib
import sys
from unittest.mock import MagicMock

import pytest
from installed import needs_sglang

pytestmark = pytest.mark.recipes

# Functions around the load that need a GPU or a model, in some version.
AROUND = (
    "LoadConfig",
    "adjust_config_with_unaligned_cpu_tp",
    "build_load_config",
    "maybe_enable_ipc_weight_cache",
    "maybe_trigger_remote_instance_nccl_send_group",
    "monkey_patch_vllm_parallel_state",
    "set_cuda_arch",
)


class Defaults:
    """SGLang's arguments with every option disabled."""

    def __getattr__(self, name):
        return False


class LoadedError(Exception):
    """An error raised inside the loader after the loader has allocated the weights."""


def test_a_draft_models_weights_survive_a_sleep_without_a_backup(sim, tag, monkeypatch):
    needs_sglang()
    from recipe_updater import published
    from sglang.srt.model_executor import model_runner
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
    from simulated_driver import Block

    tag.names.extend(("weights", "weights\x1fnone", "weights\x1fhost"))
    load_plugins()
    blocks = []

    def allocate(*_, **__):
        blocks.append(Block(sim, 4 << 20, len(blocks) + 1))
        raise LoadedError

    loader = MagicMock(load_model=allocate)
    utils = sys.modules.get("sglang.srt.model_executor.model_runner_components.load_model_utils")
    for module in filter(None, (model_runner, utils)):
        for name in AROUND:
            monkeypatch.setattr(module, name, MagicMock(), raising=False)
        monkeypatch.setattr(module, "get_available_gpu_memory", lambda *_: 0.0, raising=False)
        monkeypatch.setattr(module, "get_model_loader", lambda **_: loader, raising=False)
    saver = TorchMemorySaverAdapter.create(enable=True)
    with published():
        for is_draft in (False, True):
            runner = MagicMock(
                is_draft_worker=is_draft,
                device="cpu",
                memory_saver_adapter=saver,
                server_args=Defaults(),
            )
            with contextlib.suppress(LoadedError):
                model_runner.ModelRunner.load_model(runner)
    main, draft = blocks
    saver.pause("weights")
    assert sim.tag_bytes() == 0
    saver.resume("weights")
    assert draft.is_intact() and main.is_zero()
    del main, draft
    blocks.clear()
