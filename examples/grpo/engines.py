"""The engine of a run: SGLang's, or the model's copy."""

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

# CUDA graphs can be given back too; SGLang's own switch for it.
ENVIRONMENT = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}


def sglang_arguments(settings: Settings, vocabulary: Vocabulary, folder: Path) -> dict[str, Any]:
    """What `sglang.Engine` is started with.

    Args:
        settings: of the run.
        vocabulary: of its model.
        folder: an empty one for what SGLang reads of a model with random weights.
    """
    return {
        "model_path": str(write_config(settings.model, vocabulary, folder)),
        # The first rollout brings the weights: a model of random weights has none on disk.
        "load_format": "dummy" if settings.model in SHAPES else "auto",
        "dtype": "bfloat16",
        "mem_fraction_static": settings.memory_fraction,
        "enable_memory_saver": True,
        "disable_prefill_cuda_graph": True,  # or the graphs could not be given back
        "attention_backend": settings.attention,
        "random_seed": settings.seed,
        "log_level": "warning",
        # The same answers whatever is asked beside or before (see determinism.py).
        "enable_deterministic_inference": True,
        "sampling_backend": "pytorch",
        "disable_radix_cache": True,
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
        settings: of the run.
        vocabulary: of its model.
        place: where this process stands.
        folder: an empty one.
        servers: URLs of engines that run already, one for each data-parallel rank.
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
    return RolloutEngine.launch(
        place.engine_mesh,
        pad_token_id=vocabulary.pad,
        **sglang_arguments(settings, vocabulary, folder),
    )
