"""One rank of a round, which makes the plan's calls and compares outcomes with other ranks."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch.distributed as dist
from simulated_driver import Block, Simulator

import memsaver
import memsaver.distributed as md
from memsaver.integrations.engine.ranks import Figures, Group
from memsaver.integrations.rollout.together import GRACE_SECONDS, Together

TIMEOUT = 4.0  # seconds that a call waits for the other ranks
CONTROL_SECONDS = 120.0  # the longest wait of the ranks for each other between calls
# At most one exchange of a call fails after its timeout and the diagnosis. The rest is for a loaded
# machine.
BOUND = TIMEOUT + GRACE_SECONDS + 40.0
SIZES = (3 << 20, 4096)

Step = dict[str, Any]


class Odd(str):
    """A tag whose `repr` raises an error."""

    def __repr__(self) -> str:
        raise ValueError("no words")

    __str__ = __repr__


class Fragile:
    """A value that one rank cannot unpickle."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if int(os.environ["RANK"]) == self.rank:
            raise OSError("not here")


class Interrupts:
    """Raises KeyboardInterrupt at a random time in a block; a signal after the block has no
    effect.
    """

    def __init__(self) -> None:
        self._armed = False
        signal.signal(signal.SIGINT, self._handle)

    @contextlib.contextmanager
    def coming(self, delay: float | None) -> Iterator[None]:
        timer = threading.Timer(delay or 0, os.kill, (os.getpid(), signal.SIGINT))
        try:
            self._armed = True
            if delay is not None:
                timer.start()
            yield
        finally:
            self._armed = False
            if delay is not None:
                timer.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise KeyboardInterrupt


class Rank:
    """This rank, with known contents in its tags."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        wait = datetime.timedelta(seconds=CONTROL_SECONDS)
        dist.init_process_group("gloo", timeout=wait)
        self.control = dist.new_group(timeout=wait)
        self.sim = Simulator()
        self.blocks: dict[str, list[Block]] = {}
        for tag in ("host", "pageable", "disk"):
            with memsaver.region(tag, backup=tag):
                self.blocks[tag] = [
                    Block(self.sim, nbytes, self.rank * 10 + i) for i, nbytes in enumerate(SIZES)
                ]
        self.interrupts = Interrupts()
        self.counts: Counter[str] = Counter()
        self.connect()

    def connect(self) -> None:
        """Create new connections for the calls. A collective call."""
        self.group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
        # A longer timeout, because connecting is slow on a loaded machine.
        self.together = Together(self.group, CONTROL_SECONDS, "walk")
        self.together._timeout = TIMEOUT

    def states(self) -> dict[str, str]:
        return {tag: str(memsaver.state(tag)) for tag in self.blocks}

    def check_contents(self) -> None:
        for tag, blocks in self.blocks.items():
            if memsaver.state(tag) == "mapped":
                assert all(block.is_intact() for block in blocks), tag
        assert self.sim.violations() == []

    def everyones(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def outcome(self, step: Step) -> tuple[str, Any]:
        """Make the call within its time limit; return its outcome."""
        odd = step["odd"].get(str(self.rank), "")
        event, delay = step["events"].get(str(self.rank), ("", 0.0))
        call = self.call_of(step, odd)
        registration = None
        if event == "callback":
            registration = memsaver.on_pause(fail)
        if event in ("late", "hang"):
            time.sleep(delay + (TIMEOUT + 1 if event == "hang" else 0))
        start = time.monotonic()
        try:
            with self.interrupts.coming(delay if event == "interrupt" else None):
                call()
            found: tuple[str, Any] = ("done", None)
        except KeyboardInterrupt:
            found = ("interrupted", None)
        except md.GroupError as error:
            assert "; but " not in str(error), error
            found = ("lost", None)
        except memsaver.MemsaverError as error:
            failures = vars(error).get("failures")
            assert failures, repr(error)
            assert not vars(error).get("stuck"), repr(error)
            found = ("failed", failures)
        took = time.monotonic() - start
        assert took < BOUND, (step, took)
        if registration is not None:
            registration.remove()
        return found

    def call_of(self, step: Step, odd: str) -> Callable[[], object]:
        name = step["call"]
        if odd == "call":
            name = "resume" if name == "pause" else "pause"
        if name in ("gather", "gathered", "on_leader", "reports"):
            return self.other_call(name, odd)
        tags: list[Any] = list(step["tags"])
        into = tags[1:] or [tag for tag in self.blocks if tag not in tags]
        if odd == "tag":
            tags[0] = "nobody's"
        if odd == "name":
            tags[0] = Odd(tags[0])
        named: dict[str, Any] = {"group": self.group, "timeout": TIMEOUT}
        if odd == "timeout":
            named["timeout"] = -1
        if odd == "group":
            named["group"] = "odd"
        if odd == "backup":
            named["backup"] = "tape"
        if name == "resume":
            named.pop("backup", None)
            return lambda: md.resume(*tags, **named)
        if name == "swap":
            return lambda: md.swap(out=tags[0], into=into, **named)
        if name == "paused":
            return lambda: in_block(md.paused(*tags, **named))
        return lambda: md.pause(*tags, **named)

    def other_call(self, name: str, odd: str) -> Callable[[], object]:
        def work() -> Any:
            if odd == "error":
                raise memsaver.ConfigError("wrong here")
            return Fragile((self.rank + 1) % self.size) if odd == "value" else {"rank": self.rank}

        together = self.together
        if name == "gather":
            return lambda: together.gather("a gather", work)
        if name == "gathered":
            return lambda: together.gathered("a sum", work, len)
        if name == "on_leader":
            return lambda: together.on_leader("a call", work)
        return lambda: self.reported(odd)

    def reported(self, odd: str) -> None:
        def work() -> Figures:
            if odd:
                raise ValueError("wrong here")
            return Figures(1.0)

        reports = Group(self.group).attempt(work)
        assert [report.rank for report in reports] == list(range(self.size))
        failed = [report for report in reports if report.failure is not None]
        if failed:
            error = memsaver.MemsaverError("a rank failed")
            vars(error)["failures"] = {report.rank: report.failure for report in failed}
            raise error

    def compare(self, step: Step, before: dict[str, str], found: tuple[str, Any]) -> None:
        """Compare the outcome with the other ranks' outcomes. A collective call."""
        if found[0] == "lost" and step["call"] != "paused":  # its resume may have been lost
            assert self.states() == before, (step, before, self.states())
        self.check_contents()
        everyones = self.everyones((found, self.states()))
        kinds = [kind for (kind, _), _ in everyones]
        self.counts.update(kinds if self.rank == 0 else ())
        told = [what for (kind, what), _ in everyones if kind == "failed"]
        assert all(one == told[0] for one in told), (step, told)
        if "lost" not in kinds:
            assert not (told and "done" in kinds), (step, kinds, told)
            states = [states for _, states in everyones]
            assert all(one == states[0] for one in states), (step, kinds, states)
        if told and not any(step["odd"].values()):
            assert set(told[0]) <= {int(rank) for rank in step["events"]}, (step, told)
        if "lost" in kinds or "interrupted" in kinds:
            # After a loss the states may differ; after an interrupt before a call, the calls
            # differ.
            with contextlib.suppress(memsaver.UnknownTagError):
                memsaver.resume()
        if "lost" in kinds:
            self.connect()
        self.check_contents()


def fail(tag: str) -> None:
    raise ValueError(f"not {tag}")


def in_block(manager: Any) -> None:
    with manager:
        time.sleep(0.001)


def play(plan: dict[str, Any]) -> None:
    """Make the plan's calls and print counts of events."""
    rank = Rank()
    for step in plan["steps"]:
        before = rank.states()
        rank.compare(step, before, rank.outcome(step))
    if plan["victim"] is not None:
        survive(rank, plan)
    memsaver.resume()
    rank.check_contents()
    print(json.dumps(rank.counts), flush=True)
    if plan["victim"] is None:
        dist.barrier(rank.control)
        dist.destroy_process_group()


def survive(rank: Rank, plan: dict[str, Any]) -> None:
    """Kill one rank in a pause or resume and check that the other ranks raise `GroupError`."""
    dist.barrier(rank.control)
    if rank.rank == plan["victim"]:
        threading.Timer(plan["at"], os.kill, (os.getpid(), signal.SIGKILL)).start()
    calls = [md.pause, md.resume]
    for number in range(1000):
        before = rank.states()
        start = time.monotonic()
        try:
            calls[number % 2](group=rank.group, timeout=TIMEOUT)
        except md.GroupError as error:
            assert "; but " not in str(error), error
            assert rank.states() == before, (before, rank.states())
            break
        finally:
            assert time.monotonic() - start < BOUND
    else:
        raise AssertionError("no rank was killed")
    if rank.rank == plan["victim"]:
        time.sleep(CONTROL_SECONDS)  # until it is killed
    rank.counts["survivors"] += 1
