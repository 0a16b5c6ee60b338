"""Tests the sleep and wake-up of all engines of a mesh: the barrier's waits and errors."""

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
    """A backend that supports only sleeps and wake-ups. The next transition raises `fail` after
    `slow` seconds.

    The next wake-up raises `fail_in_wake_up`.
    """

    tp_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.control = self
        self.fail: BaseException | None = None
        self.fail_in_wake_up: BaseException | None = None
        self.slow = 0.0

    def wake_up(self, tags=None, **options):
        error, self.fail_in_wake_up = self.fail_in_wake_up, None
        if error is not None:
            raise error
        return super().wake_up(tags, **options)

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


ENTRY = """
import contextlib, datetime, os, signal, threading
import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from memsaver.distributed import GroupError, RankError
from memsaver.integrations.rollout import fence
from memsaver.integrations.rollout.ranks import layout_of
from memsaver.integrations.engine.errors import EngineTimeoutError
from test_rollout_fence import *

RANK = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
layout = layout_of(mesh)
backend = Engine() if layout.is_leader else None
engine = RolloutEngine(backend, layout, timeout=4)
fails = layout.dp_rank == 1

def entered(kind, tags=None, **options):
    # Check that the block does not run if engine 1 cannot sleep; return the error's message.
    with pytest.raises(kind) as caught:
        with engine.asleep(tags, fence=True, **options):
            raise AssertionError("the block ran")
    text = str(caught.value)
    assert "sleep(" in text and ") (engine 1) failed on rank 2 of 4" in text, text
    return text

# The sleep of engine 1 fails: engine 0 wakes again.
if fails and backend:
    backend.fail = InvalidStateError("busy")
text = entered(InvalidStateError)
assert "busy" in text and engine.status is Status.AWAKE, text
assert text.endswith(
    "; engine 1: released tags: none" if fails
    else "; engine 0 fell asleep and was woken again: released tags: none"
), text
assert backend is None or not backend.released

# Tags that were released before stay released.
if not fails:
    engine.sleep("kv_cache")
if fails and backend:
    backend.fail = InvalidStateError("busy")
text = entered(InvalidStateError)
assert fails or text.endswith("was woken again: released tags: kv_cache"), text
assert engine.released == (set() if fails else {"kv_cache"})
if fails and backend:
    backend.fail = InvalidStateError("busy")
text = entered(InvalidStateError, "kv_cache", keep_weights=False)
assert fails or text.endswith("; engine 0: released tags: kv_cache"), text
engine.wake_up()
if fails and backend:
    backend.fail = InvalidStateError("busy")
text = entered(InvalidStateError, keep_weights=False)
assert fails or text.endswith("tags: none; its weights were not kept: update them"), text

# The wake-up fails as well: the error reports both failures.
if backend:
    backend.fail = InvalidStateError("busy") if fails else None
    backend.fail_in_wake_up = None if fails else InvalidStateError("no room")
text = entered(InvalidStateError, ["weights", "kv_cache"])
assert "busy" in text and ("no room" in text) != fails, text
assert fails or "engine 0 fell asleep and could not be woken (" in text, text
assert fails or text.endswith("released tags: kv_cache, weights; call wake_up()"), text
assert engine.released == (set() if fails else {"weights", "kv_cache"})
engine.wake_up()
assert engine.status is Status.AWAKE

# An engine that hangs: the other one waits for it, and then wakes.
if fails and backend:
    backend.slow, backend.fail = 2.0, EngineTimeoutError("it hangs")
text = entered(EngineTimeoutError, timeout=2)
assert "it hangs" in text and engine.status is Status.AWAKE, text
if backend:
    backend.slow = 0.0

# An interrupt is raised only on its own rank; the other engine wakes.
if fails and backend:
    backend.fail = KeyboardInterrupt()
with pytest.raises((KeyboardInterrupt, RankError)) as caught:
    with engine.asleep(fence=True):
        raise AssertionError("the block ran")
assert caught.type is (KeyboardInterrupt if fails and backend else RankError)
assert engine.status is (Status.UNKNOWN if fails else Status.AWAKE)
assert fails or str(caught.value).endswith("was woken again: released tags: none")
assert not fails or backend or str(caught.value).endswith("engine 1: released tags: unknown")
engine.wake_up()
with engine.asleep(fence=True):
    assert engine.status is Status.ASLEEP
assert engine.status is Status.AWAKE

# An interrupt of a rank that waits for its leader is raised only there, after the sleep.
if backend:
    backend.slow = 1.0
if RANK == 1:
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
with pytest.raises(KeyboardInterrupt) if RANK == 1 else contextlib.nullcontext():
    with engine.asleep(fence=True):
        pass
assert engine.status is Status.AWAKE
if backend:
    backend.slow = 0.0

# An engine whose ranks do not make the call: the other one wakes at its timeout.
fence.GRACE_SECONDS = 0
if not fails:
    with pytest.raises(GroupError) as caught:
        with engine.asleep(fence=True):
            raise AssertionError("the block ran")
    text = str(caught.value)
    assert text.endswith("engine 0 fell asleep and was woken again: released tags: none"), text
    assert engine.status is Status.AWAKE
dist.barrier()
"""


def test_an_engine_wakes_if_another_one_does_not_fall_asleep(tmp_path):
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    rank_processes.run(here + ENTRY, 4, tmp_path, timeout=80)
