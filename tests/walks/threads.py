"""A random walk that pauses and resumes on several threads, with finalizers, signals, forks and
exits.

Two of the tags are shareable. Threads send their tensors, and the process itself receives them.

Eight threads and the main thread make random calls on a few tags: transitions with and without
waiting, regions, frees, and callbacks that begin transitions. Objects in reference cycles make the
same calls when the garbage collector finalizes them. Signal handlers also make these calls, at any
time on the main thread; other signal handlers raise. At the same time, children are forked and
exit.

The walk checks that no call waits forever, that every error is an `InvalidStateError` or was raised
by a handler, and that contents are intact. The walk also checks that callbacks agree with the tags'
states, that no tag stays reserved, and that memsaver's numbers equal the driver's.
"""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType

from simulated_driver import Block, Simulator

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import InvalidStateError
from walks.children import forked
from walks.sharing import Shares

TAGS = ("a", "b", "c", "d")
SHAREABLE = ("c", "d")
IMPORTER_SECONDS = 0.02  # a tensor that waits for the garbage collector can take longer
THREADS = 8
MOST_CYCLES = 16  # cycles that wait for the garbage collector


class Alarm(BaseException):
    """An exception that signal handlers raise at any point on the main thread."""


def walk(seed: int, seconds: float) -> dict[str, object]:
    """Walk for about `seconds` seconds; return how often each event happened."""
    gc.set_threshold(50, 5, 5)
    warnings.simplefilter("ignore")
    return Walk(seed).run(seconds)


class Walk:
    """A process's random walk.

    Attributes:
        counts: how often each event happened.
        wrong: descriptions of broken promises.
        cycles: one item for each `Cycle` that has not been finalized.
    """

    def __init__(self, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.cycles: list[None] = []
        self._random = random.Random(seed)
        self._sim = Simulator()
        self._sim.start()
        self._main = threading.get_ident()
        self._over = False
        self._armed = False  # the alarm's handler raises
        self._depth = 0  # nested handlers
        self._steps = 0  # steps of the main thread
        self._signalled = -1  # the step in which the last signal was sent
        self._told = dict.fromkeys(TAGS, "mapped")
        self._blocks: dict[str, list[Block]] = {}
        memsaver.configure(importer_seconds=IMPORTER_SECONDS)
        for number, tag in enumerate(TAGS):
            with memsaver.region(tag, backup="host", shareable=tag in SHAREABLE):
                self._blocks[tag] = [Block(self._sim, 4096 * n, number + n) for n in (1, 3)]
        self._shares = Shares(block for tag in SHAREABLE for block in self._blocks[tag])

    def run(self, seconds: float) -> dict[str, object]:
        signal.signal(signal.SIGALRM, self._alarm)
        signal.signal(signal.SIGUSR1, self._handle)
        sys.unraisablehook = self._unraisable
        registered = [memsaver.on_pause(self._pausing), memsaver.on_resume(self._resumed)]
        seeds = [self._random.random() for _ in range(THREADS)]
        threads = [
            threading.Thread(target=self._work, args=[random.Random(seed)], daemon=True)
            for seed in seeds
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.wrong:
            try:
                self._alarmed_step(self._random)
            except Alarm:
                pass
            except Exception as error:
                self.wrong.append(f"in the main thread: {error!r}")
        self._armed, self._over = False, True
        signal.setitimer(signal.ITIMER_REAL, 0)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread waits forever"
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        self._conclude()
        for registration in registered:
            registration.remove()
        return dict(self.counts)

    def _conclude(self) -> None:
        self._collect()
        reserved = _C.Reservation(list(TAGS))
        reserved.take()  # waits for transitions in progress
        reserved.release()
        told, states = dict(self._told), {tag: str(memsaver.state(tag)) for tag in TAGS}
        memsaver.resume()
        self.wrong += [f"at the end, {why}" for why in map(self._damage, TAGS) if why]
        assert not self.wrong, self.wrong
        assert told == states, (told, states)
        assert self._told == dict.fromkeys(TAGS, "mapped"), self._told
        assert _C.region_depth() == 0
        assert self._sim.violations() == []
        resident = sum(row.resident_bytes for row in memsaver.stats().tags)
        assert resident == self._sim.tag_bytes(), (resident, self._sim.tag_bytes())

    def _collect(self) -> None:
        """Call all finalizers.

        While another thread collects garbage, gc.collect() returns immediately.
        """
        gc.disable()
        last = Garbage()
        reference = weakref.ref(last)
        del last
        end = time.monotonic() + 60
        while reference() is not None:
            assert time.monotonic() < end, "a finalizer waits forever"
            gc.collect()
            time.sleep(0.001)

    # --- threads and the main thread

    def _alarmed_step(self, rng: random.Random) -> None:
        self._steps += 1
        try:
            if rng.random() < 0.5:
                self._armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 4e-3))
            self._step(rng)
        finally:
            self._armed = False
        if rng.random() < 0.02:
            self._fork(rng)

    def _work(self, rng: random.Random) -> None:
        while not self._over and not self.wrong:
            try:
                self._step(rng)
                # One signal for each step: more signals than the handlers can process would stop
                # any program.
                if rng.random() < 0.1 and self._signalled != self._steps:
                    self._signalled = self._steps
                    signal.pthread_kill(self._main, signal.SIGUSR1)
                if rng.random() < 0.005:
                    self._fork(rng)
            except BaseException:
                self.wrong.append(f"in a thread: {traceback.format_exc()}")

    def _step(self, rng: random.Random) -> None:
        name, action = rng.choice(list(self._actions().items()))
        try:
            action(rng)
            self.counts[name] += 1
        except InvalidStateError as error:
            self.counts[f"{name} refused"] += 1
            text = str(error)
            known = ("for ever", "while the tag is paused", "is open", "is paused", "innermost")
            known += ("other processes use",)
            if not any(part in text for part in known):
                self.wrong.append(f"{name}: {text}")
        except Alarm:
            self.counts[f"{name} cut"] += 1
            raise

    def _actions(self) -> dict[str, Callable[[random.Random], object]]:
        return {
            "pause": lambda rng: memsaver.pause(*self._some(rng)),
            "resume": lambda rng: memsaver.resume(*self._some(rng)),
            "swap": self._swap,
            "background": self._background,
            "paused": self._paused,
            "region": self._region,
            "cycle": self._cycle,
            "look": self._look,
            "share": self._share,
            "timeline": self._timeline,
            "trim": lambda rng: memsaver.trim(wait=rng.random() < 0.5),
        }

    # --- operations

    def _some(self, rng: random.Random) -> list[str]:
        return rng.sample(TAGS, rng.randint(1, 2))

    def _swap(self, rng: random.Random) -> None:
        out, into = rng.sample(TAGS, 2)
        memsaver.swap(out=out, into=into)

    def _background(self, rng: random.Random) -> None:
        call = memsaver.pause if rng.random() < 0.5 else memsaver.resume
        handle = call(*self._some(rng), wait=False)
        if rng.random() < 0.5:
            with contextlib.suppress(TimeoutError):
                handle.wait(rng.choice([None, 0.0, 0.001]))
        elif rng.random() < 0.3:
            handle.wait_stream(0)

    def _paused(self, rng: random.Random) -> None:
        with memsaver.paused(*self._some(rng)):
            self._cycle(rng)

    def _region(self, rng: random.Random) -> None:
        depth = _C.region_depth()
        try:
            with memsaver.region(rng.choice(TAGS)):
                address = _C.malloc(rng.choice([512, 70_000]))
                self._cycle(rng)
            _C.free(address)
        finally:
            if _C.region_depth() != depth:
                self.wrong.append(f"region depth {_C.region_depth()}, was {depth}")

    def _cycle(self, rng: random.Random) -> None:
        # Python's collector calls all finalizers on one thread. If the other threads created
        # cycles faster than that, its call would never return.
        if len(self.cycles) < MOST_CYCLES:
            Cycle(self, rng.random())

    def _share(self, rng: random.Random) -> None:
        received, why = self._shares.receive(rng)
        if why is not None:
            self.wrong.append(why)
        self.counts["received"] += received is not None
        if rng.random() < 0.2 and len(self.cycles) < MOST_CYCLES:
            Cycle(self, rng.random(), received)

    def _timeline(self, rng: random.Random) -> None:
        try:
            with memsaver.timeline(events=64, interval=rng.choice([None, 0.001])) as recording:
                self._cycle(rng)
                assert recording.trace is not None
        except InvalidStateError as error:
            if "one" not in str(error) and "recorded" not in str(error):
                raise

    def _look(self, rng: random.Random) -> None:
        tag = rng.choice(TAGS)
        with _C.Reservation([tag]):
            before = self._pauses(tag)
            if memsaver.state(tag) != "mapped":
                return
            why = self._damage(tag)
            # A finalizer or a handler on this thread may have paused the tag already. Checked in
            # this order, the state shows a pause in progress, and the count a finished one.
            if memsaver.state(tag) != "mapped" or self._pauses(tag) != before:
                return
            self.counts["contents compared"] += 1
            if why:
                self.wrong.append(why)

    def _damage(self, tag: str) -> str | None:
        """Return a description of the tag's wrong contents, or None if the contents are intact."""
        for block in self._blocks[tag]:
            try:
                found, expected = block.bytes(), block.expected()
            except AssertionError as error:  # the memory is not mapped
                return f"contents of {tag} are lost: {error}"
            if found != expected:
                return f"contents of {tag} are lost: {found[:16].hex()}, not {expected[:16].hex()}"
        return None

    def _pauses(self, tag: str) -> int:
        return sum(row.pauses for row in memsaver.stats().tags if row.tag == tag)

    def _fork(self, rng: random.Random) -> None:
        why = forked(hard=rng.random() < 0.5, interrupted=Alarm)
        self.counts["fork"] += why is None
        if why:
            self.wrong.append(why)

    # --- interruptions

    def _alarm(self, number: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise Alarm

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal by calling memsaver."""
        if self._depth > 2 or self._over:
            return
        self._depth += 1
        try:
            self.counts["handler"] += 1
            self.from_outside(random.Random(self.counts["handler"]))
        finally:
            self._depth -= 1

    def from_outside(self, rng: random.Random) -> None:
        """Make a random call as a signal handler or finalizer does: on any thread, during any
        other call.
        """
        tags = self._some(rng)
        calls: list[Callable[[], object]] = [
            lambda: memsaver.pause(*tags),
            lambda: memsaver.resume(*tags),
            lambda: memsaver.pause(*tags, wait=False),
            lambda: memsaver.resume(*tags, wait=False),
            lambda: self._enter_and_leave(tags),
            lambda: self._shares.send(rng),
            memsaver.stats,
            memsaver.trim,
        ]
        try:
            rng.choice(calls)()
        except InvalidStateError:
            self.counts["refused from outside"] += 1

    def _enter_and_leave(self, tags: list[str]) -> None:
        with memsaver.paused(*tags):
            pass

    def _pausing(self, tag: str) -> None:
        self._told[tag] = "paused"
        self.counts["on_pause"] += 1
        if self.counts["on_pause"] % 7 == 0:  # a callback may begin transitions
            self.from_outside(random.Random(self.counts["on_pause"]))

    def _resumed(self, tag: str) -> None:
        self._told[tag] = "mapped"
        self.counts["on_resume"] += 1

    def _unraisable(self, found: sys.UnraisableHookArgs) -> None:
        if not isinstance(found.exc_value, InvalidStateError | Alarm):
            self.wrong.append(f"unraisable: {found.exc_value!r} in {found.object!r}")


class Garbage:
    """An object that only the garbage collector frees."""

    def __init__(self) -> None:
        self._itself = self


class Cycle:
    """An object that only the garbage collector frees, and whose finalizer calls memsaver."""

    _owner: Walk | None = None  # set by __init__, which a signal can interrupt

    def __init__(self, owner: Walk, seed: float, received: object = None) -> None:
        self._itself = self
        self._received = received
        self._seed = seed
        self._owner = owner
        owner.cycles.append(None)

    def __del__(self) -> None:
        if self._owner is None:
            return
        self._owner.cycles.pop()
        self._owner.counts["finalizer"] += 1
        self._owner.from_outside(random.Random(self._seed))
