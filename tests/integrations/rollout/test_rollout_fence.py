"""Test sleep and wake-up of all engines of a mesh: the barrier's waits and errors."""

import time
from pathlib import Path

import pytest
import rank_processes
from weight_engine import Control

from memsaver.errors import InvalidStateError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.engine.tags import RELEASE_ORDER
from memsaver.integrations.rollout import RolloutEngine

TAGS = frozenset(RELEASE_ORDER)


class Engine(Control):
    """A backend that can only sleep. The next transition raises `fail`, after `slow` seconds."""

    tp_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.control = self
        self.fail: BaseException | None = None
        self.slow = 0.0

    def become(self, released):
        time.sleep(self.slow)
        error, self.fail = self.fail, None
        if error is None:
            return super().become(released)
        if isinstance(error, KeyboardInterrupt):
            super().become(released)  # the interrupt came after the transition
        raise error

    def close(self) -> None:
        pass


def test_a_fence_of_one_engine_leaves_its_error_alone():
    backend = Engine()
    engine = RolloutEngine(backend, timeout=5)
    own = backend.fail = InvalidStateError("busy", tag="kv_cache")
    with pytest.raises(InvalidStateError) as caught:
        engine.sleep(fence=True)
    assert caught.value is own and str(own) == "busy" and own.__cause__ is None


def test_the_status_after_an_interrupted_transition_is_unknown():
    backend = Engine()
    engine = RolloutEngine(backend, timeout=5)
    backend.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.sleep()
    assert engine.status is Status.UNKNOWN
    with pytest.raises(InvalidStateError, match="unknown state"):
        engine.check("generate")


CODE = """
import datetime, os, threading, time
from concurrent.futures import ThreadPoolExecutor
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from memsaver.distributed import RankError
from memsaver.integrations.rollout.ranks import layout_of
from memsaver.integrations.engine.errors import EngineTimeoutError
from test_rollout_fence import *

RANK = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
backend = Engine()
engine = RolloutEngine(backend, layout_of(mesh), timeout=2)

# Engines of which one is asleep before, or partly so: each has its own back, and nobody fails.
for before in ([], ["kv_cache"], list(TAGS)):
    if RANK == 1 and before:
        engine.sleep(before)
    with engine.asleep(fence=True) as report:
        assert engine.status is Status.ASLEEP
        assert set(report.changed) == TAGS - (set(before) if RANK == 1 else set())
    assert backend.released == (set(before) if RANK == 1 else set())
    engine.wake_up()

# A sleep that fails only at its timeout: the other rank waits long enough to receive the error.
if RANK == 1:
    backend.slow, backend.fail = 2.5, EngineTimeoutError("it hangs")
with pytest.raises(EngineTimeoutError, match="it hangs") as caught:
    engine.sleep(fence=True)
assert list(caught.value.failures) == [1] and "rank 1 of 2" in str(caught.value)
# The same if the others failed at once, and the call has more time than the fence.
backend.slow, backend.fail = RANK * 3.0, EngineTimeoutError(f"engine {RANK}")
with pytest.raises(EngineTimeoutError) as caught:
    engine.wake_up(fence=True, timeout=4)
assert list(caught.value.failures) == [0, 1]
backend.slow = 0.0

# An error that holds what cannot travel.
if RANK == 1:
    backend.fail = InvalidStateError("it holds a lock")
    backend.fail.lock = threading.Lock()
with pytest.raises(RankError, match="rank 1 of 2: .*it holds a lock") as caught:
    engine.wake_up(fence=True)
assert list(caught.value.failures) == [1]

# Threads with an engine each need no common order; the calls of one engine do.
engines = engine, RolloutEngine(Engine(), layout_of(mesh), timeout=20)
with ThreadPoolExecutor(2) as threads:
    first = threads.submit(engines[RANK].sleep, fence=True)
    time.sleep(0.2)
    second = threads.submit(engines[1 - RANK].sleep, fence=True)
    assert first.result(20).changed and second.result(20).changed
with pytest.raises(RankError, match="in the same order on all ranks, from one"):
    engine.wake_up(fence=RANK == 0)
    engine.sleep(fence=True)
engine.wake_up(fence=True)

# An interrupt is for its own rank.
if RANK == 0:
    backend.fail = KeyboardInterrupt()
with pytest.raises((KeyboardInterrupt, RankError)) as caught:
    engine.wake_up(fence=True)
assert caught.type is (RankError if RANK else KeyboardInterrupt)
assert RANK == 0 or "KeyboardInterrupt" in str(caught.value)
dist.barrier()
"""


def test_engines_of_a_mesh_wait_for_each_other(tmp_path):
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    rank_processes.run(here + CODE, 2, tmp_path, timeout=80)
