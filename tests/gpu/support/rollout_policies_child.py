"""Runs a scenario in which a trainer's sleeping rollout engines receive requests.

usage: rollout_policies_child.py SCENARIO FOLDER

The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expected_errors import raises
from rollout_child import (
    GIB,
    PROMPTS,
    RANK,
    TOKENS,
    arguments,
    flushed,
    greedy,
    in_background,
    joined,
    play,
    rows,
)


def wait_until_asleep(engine: Any) -> None:
    """Wait until an idle engine has put itself to sleep. A collective call."""
    from memsaver.integrations.sglang import Status

    end = time.monotonic() + 30
    while engine.refresh() is not Status.ASLEEP:
        assert time.monotonic() < end, "the idle engine does not sleep"
        time.sleep(0.1)


def policies(folder: Path) -> None:
    """Send requests to two sleeping engines of this process, each with its own policy."""
    import sglang
    import torch

    from memsaver.integrations.engine.errors import EngineAsleepError
    from memsaver.integrations.rollout import RolloutEngine
    from memsaver.integrations.sglang import Status

    assert sglang.__version__
    torch.cuda.set_device(0)
    named = {**arguments(folder), "timeout": 240}
    with (
        RolloutEngine.launch(**named, asleep="wake", sleep_after=3) as wakes,
        RolloutEngine.launch(**named, asleep="wait", asleep_wait=10) as waits,
    ):
        expected = rows(wakes.generate([PROMPTS[0]], greedy()))
        assert rows(waits.generate([PROMPTS[0]], greedy())) == expected
        waits.sleep(wait_idle=True)
        wait_until_asleep(wakes)
        work, results = in_background(waits, TOKENS)
        flushed(wakes)
        assert rows(wakes.generate([PROMPTS[0]], greedy())) == expected
        assert waits.refresh() is Status.ASLEEP and work.is_alive() and not results
        waits.wake_up()
        work.join(30)
        assert [rows(output) for output in results] == [expected]
        waits.sleep(wait_idle=True)
        with raises(EngineAsleepError) as caught:
            waits.generate([PROMPTS[0]], greedy())
        assert "no caller woke it up within 10 s" in str(caught[0]), caught[0]
        waits.wake_up()
        flushed(waits)
        assert rows(waits.generate([PROMPTS[0]], greedy())) == expected


def policies_of_ranks(folder: Path, **parallel: Any) -> None:
    """Send requests to the sleeping engines of two ranks, each with its own policy.

    Args:
        folder: the scenario's folder.
        parallel: either `pp_size` or `dp_size`; without an argument, the ranks are tensor-parallel.
    """
    import torch
    import torch.distributed as dist

    from memsaver.integrations.engine.errors import EngineAsleepError
    from memsaver.integrations.rollout import RolloutEngine
    from memsaver.integrations.sglang import Status

    mesh, named = joined(folder)
    named.update(parallel)

    def generated(engine: Any) -> list[list[int]]:
        flushed(engine)
        return rows(engine.generate([PROMPTS[0]] if RANK == 0 else [], greedy()))

    def free() -> int:
        return int(torch.cuda.mem_get_info(RANK)[0])

    with RolloutEngine.launch(mesh, **named, asleep="wake", sleep_after=3) as engine:
        generated(engine)  # compiles kernels
        expected, awake = generated(engine), free()
        for _ in range(2):
            wait_until_asleep(engine)
            end = time.monotonic() + 30
            while free() - awake < GIB:  # replicas release their memory one after the other
                assert time.monotonic() < end, (free(), awake)
                time.sleep(0.1)
            assert generated(engine) == expected
    with RolloutEngine.launch(mesh, **named, asleep="wait", asleep_wait=30) as engine:
        generated(engine)
        engine.sleep(wait_idle=True)
        work, results = in_background(engine, TOKENS, PROMPTS[:1] if RANK == 0 else [])
        time.sleep(2)
        assert work.is_alive() and not results
        engine.wake_up()
        work.join(30)
        assert [rows(output) for output in results] == [expected]
        assert engine.refresh() is Status.AWAKE
    with RolloutEngine.launch(mesh, **named) as engine:
        engine.sleep(wait_idle=True)
        with raises(EngineAsleepError) as caught:
            generated(engine)
        assert set(caught[0].tags) >= {"kv_cache", "weights"}, caught[0]
        engine.wake_up()
        assert generated(engine) == expected
    dist.destroy_process_group()


SCENES: dict[str, Callable[[Path], None]] = {
    "one_rank": policies,
    "two_ranks": policies_of_ranks,
    "two_stages": functools.partial(policies_of_ranks, pp_size=2),
    "two_replicas": functools.partial(policies_of_ranks, dp_size=2),
}


if __name__ == "__main__":
    play(SCENES)
