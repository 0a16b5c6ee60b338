"""Tests attempts on every rank, as in the integrations, with interrupts and unusual errors."""

from __future__ import annotations

import pytest
import rank_processes

pytest.importorskip("torch")

pytestmark = pytest.mark.each_python

CODE = """
import datetime, gc, os, signal, weakref
import torch.distributed as dist
from memsaver.distributed import RankError
from memsaver.distributed.channel import Channel
from memsaver.errors import InvalidStateError
from memsaver.integrations.lightrft.ranks import on_every_rank
from memsaver.integrations.engine.ranks import Figures, Group
from rank_calls import gathered

RANK = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))

class OddError(Exception):
    __str__ = lambda self: 1 / 0

def act(kind):
    if RANK != 1:
        return Figures(1.0 + RANK, {"w": RANK}, {})
    if kind == "interrupt":
        signal.raise_signal(signal.SIGINT)
    raise {"exit": SystemExit(3), "error": ValueError("no"), "odd": OddError()}[kind]

KINDS = {
    "interrupt": KeyboardInterrupt, "exit": SystemExit, "error": ValueError, "odd": OddError
}

# LightRFT's attempts: all ranks raise the same error; an interrupt or exit is its own rank's.
for kind, raised in KINDS.items():
    try:
        on_every_rank("the work", lambda: vars(act(kind)), "call it again")
    except RankError as error:
        assert RANK != 1 or issubclass(raised, Exception)
        assert error.failures[1].kind == raised.__name__ and "call it again" in str(error)
        assert isinstance(error.__cause__, raised if RANK == 1 else type(None))
    except BaseException as error:
        assert RANK == 1 and type(error) is raised
    else:
        raise AssertionError(kind)

# An engine's attempts: the reports of the ranks that did not fail are complete.
group = Group(dist.group.WORLD)
for kind, raised in KINDS.items():
    try:
        reports = group.attempt(lambda: act(kind))
    except BaseException as error:
        assert RANK == 1 and type(error) is raised and not isinstance(error, Exception)
        continue
    assert [report.rank for report in reports] == [0, 1, 2]
    assert reports[1].failure.kind == raised.__name__ and reports[1].host
    assert [reports[at].seconds for at in (0, 2)] == [1.0, 3.0]
    assert reports[2].device_bytes == {"w": 2} and reports[2].pid != reports[0].pid
for kind, raised in KINDS.items():
    work = lambda: {"rank": act(kind).seconds}
    try:
        rows = group.collect(work, lambda error: {"kind": type(error).__name__})
    except BaseException as error:
        assert RANK == 1 and type(error) is raised and not isinstance(error, Exception)
        continue
    assert rows == [{"rank": 1.0}, {"kind": raised.__name__}, {"rank": 3.0}], rows
assert group.collect(dict, vars) == [{}, {}, {}]
try:
    group.collect(lambda: 1 / 0, lambda error: {"error": error})
except RankError as error:
    assert sorted(error.failures) == [0, 1, 2]
else:
    raise AssertionError
# What the work used is freed with its exception.
class Used:
    pass
def fail():
    used = Used()
    alive.append(weakref.ref(used))
    raise ValueError("no")
gc.disable()
alive = []
for ranks in (group, Group(None)):
    assert ranks.collect(fail, lambda error: {"text": str(error)})[0] == {"text": "no"}
assert [one() for one in alive] == [None, None]
gc.enable()
assert group.gather({"rank": RANK, "text": "x" * 500}) == [
    {"rank": rank, "text": "x" * 500} for rank in range(3)
]
# Work without figures, on all ranks or on one, and a failure of one beside it.
assert [one.rank for one in group.attempt(lambda: None)] == [0, 1, 2]
reports = group.attempt(lambda: None if RANK == 1 else Figures(2.0))
assert [one.seconds for one in reports] == [2.0, 0.0, 2.0] and reports[0].pid
reports = group.attempt(lambda: act("error") if RANK == 1 else None)
assert [one.failure and one.failure.kind for one in reports] == [None, "ValueError", None]
(alone,) = Group(None).attempt(Figures)
assert alone.failure is None and alone.pid == os.getpid()
(alone,) = Group(None).attempt(lambda: 1 / 0)
assert alone.failure.kind == "ZeroDivisionError"
# A group of one rank exchanges nothing. Its errors name the rank in the world.
single = [dist.new_group([rank]) for rank in range(3)][RANK]
group = Group(single)
assert group.gather({"rank": RANK}) == [{"rank": RANK}]
assert [one.rank for one in group.attempt(Figures)] == [0]
assert Channel(single)._link.collectives == 0
try:
    group.gather({"value": object()})
except RankError as error:
    assert list(error.failures) == [RANK] and f"rank {RANK}" in str(error), error
else:
    raise AssertionError
dist.destroy_process_group(single)
try:
    group.gather({"rank": RANK})
except InvalidStateError as error:
    assert "destroyed" in str(error)
else:
    raise AssertionError
assert gathered(RANK) == [0, 1, 2]
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


@pytest.mark.timeout(120)
def test_an_attempt_has_the_same_outcome_on_all_ranks(tmp_path):
    rank_processes.run(CODE, 3, tmp_path, timeout=80)
