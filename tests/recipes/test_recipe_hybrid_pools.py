"""Tests that the KV cache of models with sliding windows is released like other KV caches in
SGLang.
"""

from __future__ import annotations

import inspect

import pytest
from installed import needs_sglang

pytestmark = pytest.mark.recipes
MIB = 1 << 20


@pytest.mark.parametrize("saves", [False, True])
def test_a_cache_with_sliding_windows_is_released_if_the_engine_has_a_saver(
    sim, tag, monkeypatch, saves
):
    needs_sglang()
    import torch
    from sglang.srt.mem_cache import swa_memory_pool
    from sglang.srt.plugins import load_plugins
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
    from simulated_driver import Block

    from memsaver.errors import InvalidStateError
    from memsaver.integrations.sglang import plugin

    tag.names.append("kv_cache")
    load_plugins()
    monkeypatch.delitem(plugin._done, "started", raising=False)
    saver = TorchMemorySaverAdapter.create(enable=saves)
    blocks, plain, zeros = [], [], torch.zeros

    def allocate(*args, **named):
        try:
            blocks.append(Block(sim, 2 * MIB, len(blocks) + 1))
        except InvalidStateError:  # the caller is in no region
            plain.append(args)
        return zeros(*args, **named)

    wanted = inspect.signature(swa_memory_pool.SWAKVPool.__init__).parameters
    optional = {"enable_kvcache_transpose": False, "enable_memory_saver": saves}
    monkeypatch.setattr(torch, "zeros", allocate)
    pool = swa_memory_pool.SWAKVPool(
        size=16,
        size_swa=8,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=8,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        device="cpu",
        **{name: value for name, value in optional.items() if name in wanted},
    )
    monkeypatch.undo()
    assert len(blocks if saves else plain) >= len(pool.layers_mapping)
    assert not (plain if saves else blocks)
    saver.pause("kv_cache")
    assert sim.tag_bytes() == 0
    saver.resume("kv_cache")
    assert sim.tag_bytes() == 2 * MIB * len(blocks)
    del blocks[:]
