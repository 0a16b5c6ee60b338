"""Start or connect to a run's engine: SGLang, vLLM, or a copy of the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from model_engine import ModelEngine
from places import Place
from policy_model import SHAPES, make_model, write_config
from settings import Settings
from vocabulary import Vocabulary

from memsaver.integrations.rollout import RolloutEngine

# Lets CUDA graphs release memory too: SGLang's own switch, and memsaver's for vLLM.
ENVIRONMENT = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "MEMSAVER_VLLM_GRAPHS": "1"}

# vLLM's name of the backend that SGLang calls "triton".
VLLM_ATTENTION = {"triton": "TRITON_ATTN"}


def sglang_arguments(settings: Settings, vocabulary: Vocabulary, folder: Path) -> dict[str, Any]:
    """Return the arguments for `sglang.Engine`.

    Args:
        settings: the run's settings.
        vocabulary: the model's vocabulary.
        folder: an empty folder for the configuration of a model with random weights.
    """
    return {
        "model_path": str(write_config(settings.model, vocabulary, folder)),
        # The first rollout sends the weights: a model with random weights has no weights on disk.
        "load_format": "dummy" if settings.model in SHAPES else "auto",
        "dtype": "bfloat16",
        "mem_fraction_static": settings.memory_fraction,
        "enable_memory_saver": True,
        "disable_prefill_cuda_graph": True,  # otherwise the graphs could not release memory
        "attention_backend": settings.attention,
        "random_seed": settings.seed,
        "log_level": "warning",
        # Answers do not depend on other prompts in the batch or on earlier ones (determinism.py).
        "enable_deterministic_inference": True,
        "sampling_backend": "pytorch",
        "disable_radix_cache": True,
    }


def vllm_arguments(settings: Settings, vocabulary: Vocabulary, folder: Path) -> dict[str, Any]:
    """Return the arguments for vLLM's `AsyncEngineArgs`; see `sglang_arguments`."""
    return {
        "model": str(write_config(settings.model, vocabulary, folder)),
        "load_format": "dummy" if settings.model in SHAPES else "auto",
        "dtype": "bfloat16",
        "gpu_memory_utilization": settings.memory_fraction,
        "attention_config": {"backend": VLLM_ATTENTION.get(settings.attention, settings.attention)},
        "seed": settings.seed,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        # Graphs for decoding, without torch.compile, which takes minutes even for a short run.
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        "disable_log_stats": True,
        "sleep_level": 2,  # each rollout sends the weights again
    }


def make_engine(
    settings: Settings,
    vocabulary: Vocabulary,
    place: Place,
    folder: Path,
    servers: Sequence[str] = (),
) -> Any:
    """Start the run's engine, or connect to it. A collective.

    Args:
        settings: the run's settings.
        vocabulary: the model's vocabulary.
        place: this process's place among the ranks.
        folder: an empty folder.
        servers: URLs of running engines, one for each data-parallel rank.
    """
    if settings.engine == "model":
        model = make_model(settings.model, vocabulary, settings.seed, torch.device("cpu"))
        return ModelEngine(model, vocabulary.pad, place.device)
    if servers:
        return RolloutEngine.connect(
            list(servers) if place.engine_mesh is not None else servers[0],
            place.engine_mesh,
            pad_token_id=vocabulary.pad,
        )
    os.environ.update(ENVIRONMENT)
    arguments = {"sglang": sglang_arguments, "vllm": vllm_arguments}[settings.engine]
    return RolloutEngine.launch(
        place.engine_mesh,
        pad_token_id=vocabulary.pad,
        kind=settings.engine,
        **arguments(settings, vocabulary, folder),
    )
