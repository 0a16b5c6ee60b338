"""The calls that TRL 1.16 makes to a colocated vLLM in sleep mode.

tests/recipes/test_recipe_trl.py checks that TRL's own trainer makes these calls in this order.
"""

from __future__ import annotations

from typing import Any

START = ["sleep 2"]
STEP = ["wake_up weights", "load_weights", "reset_prefix_cache", "wake_up kv_cache", "generate"]
STEP += ["sleep 2"]


def start(llm) -> None:
    """Make the calls that the trainer's constructor makes."""
    llm.sleep(level=2)


def sync_weights(llm, weights: dict[str, Any]) -> None:
    """Wake the weights and load new weights directly into the model, tensor by tensor."""
    llm.wake_up(tags=["weights"])
    for named in weights.items():
        model_of(llm).load_weights([named])
    llm.reset_prefix_cache()


def generate(llm, prompts: list[Any]) -> Any:
    """Wake the KV cache, generate, and sleep."""
    llm.wake_up(tags=["kv_cache"])
    outputs = llm.generate(prompts)
    llm.sleep(level=2)
    return outputs


def step(llm, weights: dict[str, Any], prompts: list[Any]) -> Any:
    """Make the calls of a training step and return the outputs."""
    sync_weights(llm, weights)
    return generate(llm, prompts)


def model_of(llm) -> Any:
    """Return the model of this process's engine."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def worker_of(llm) -> Any:
    """Return the worker of this process's engine."""
    return llm.llm_engine.model_executor.driver_worker.worker
