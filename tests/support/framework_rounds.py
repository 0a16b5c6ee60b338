"""Checks of the calls that a framework makes to an SGLang engine, for the recipes."""

from __future__ import annotations

import memsaver

MAPPED = {"kv_cache": "mapped", "weights": "mapped"}
ONLY_WEIGHTS = {"kv_cache": "paused", "weights": "mapped"}


def states():
    """Return the states of the engine's tags."""
    return {tag: memsaver.state(tag) for tag in MAPPED}


def check_stages(engine, sim, release, resume_weights, resume_rest) -> None:
    """Make the calls of two rounds. Each round releases all memory and resumes it in two stages."""
    full = sim.tag_bytes()
    for _ in range(2):
        engine.scheduler.kv_cache.fill(7)
        release()
        assert sim.tag_bytes() == 0
        resume_weights()
        assert states() == ONLY_WEIGHTS and engine.scheduler.weights.is_intact()
        resume_rest()
        assert sim.tag_bytes() == full and engine.scheduler.kv_cache.is_zero()


def check_repeated(engine, *calls) -> None:
    """Make calls, including some without an effect; check that all memory is mapped at the end."""
    for call in calls:
        call()
    assert states() == MAPPED and engine.scheduler.weights.is_intact()
