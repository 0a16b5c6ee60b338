"""Tests that SGLang itself leaves the KV cache to a memory saver."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from installed import needs_sglang

pytestmark = pytest.mark.recipes


def test_sglang_sizes_no_cache_after_the_capture_with_a_memory_saver(monkeypatch):
    """Otherwise, SGLang would allocate the KV cache through driver calls that no memory saver
    intercepts.
    """
    needs_sglang()
    try:
        from sglang.srt.arg_groups import overrides

        planned = overrides.post_capture_kv_sizing_planned
    except (AttributeError, ImportError):
        pytest.skip("this version of SGLang has no plan to size the KV cache after the capture")
    model = SimpleNamespace(
        is_hybrid_swa=False, hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"])
    )
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    monkeypatch.setattr(overrides, "model_config_of", lambda _: model)
    monkeypatch.setattr(overrides, "resolving_view", lambda arguments: arguments)
    monkeypatch.setattr(overrides, "use_mla_backend", lambda _: False)
    arguments = MagicMock(
        dcp_size=1,
        device="cuda",
        disaggregation_mode="decode",
        enable_kv_cache_sharding=False,
        enable_unified_memory=False,
        prefill_only_disable_kv_cache=False,
    )
    found = {}
    for saves in (False, True):
        arguments.enable_memory_saver = saves
        found[saves] = planned(arguments)
    assert found == {False: True, True: False}
