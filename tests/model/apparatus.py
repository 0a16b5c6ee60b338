"""The operations' base class, which compares the library with its model after each operation."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from exporting_processes import Exporters
from faults.injections import Injection
from hypothesis.errors import HypothesisException
from hypothesis.stateful import RuleBasedStateMachine

import memsaver
from memsaver._memory import regions
from memsaver._runtime.native import _C, emit_warnings
from memsaver.errors import MemsaverError
from model.calls import Outcome, System, attempt
from model.checks import check_location, check_statistics, check_tag, require
from model.expected import Allocation, Tag
from model.importers import Importers
from model.journal import Journal
from model.place import DEVICES, MIB, NAMES, Place
from model.threads import Hand, Here

THREADS = 3
DEFAULTS = {
    "share_bytes": 512 * MIB,
    "slab_bytes": 64 * MIB,
    "margin_bytes": 0,
    "host_bytes": 0,
    "fingerprints": True,
    "poison": False,
    "disk_dir": "",
    "importer_seconds": 30,
}
WHOLLY_EVERY = 16  # operations between two comparisons of all memory
REST = 12  # operations; see is_rested
_HELD_SECONDS = 0.0003  # how long the program's own work continues in a call that waits for it


class Process:
    """The state that outlives a sequence: devices, threads and operation counts."""

    def __init__(self, journal: Journal, folders: list[str]) -> None:
        self.place = Place()
        self.system = System(self.place.sim)
        self.hands = [Here(), *(Hand() for _ in range(THREADS - 1))]
        self.helper = Hand()
        self.exporters = Exporters()
        self.importers = Importers()
        self.journal = journal
        self.folders = folders
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.sequences = 0
        self.met = self.unchanged = self.cut_short = 0
        self.warned: list[str] = []


class Apparatus(RuleBasedStateMachine):
    """One sequence, which begins and ends with nothing allocated and nothing paused."""

    process: Process

    def __init__(self) -> None:
        super().__init__()
        self.place = self.process.place
        self.sim = self.place.sim
        self._recover()
        self.tags = [Tag(name) for name in NAMES]
        for tag in self.tags:
            with memsaver.region(tag.name, backup="none"):
                pass
        self.poison = False
        self.flying: list[tuple[str, Any, list[Tag]]] = []
        self.stacks: list[list[tuple[Any, Tag | None]]] = [[] for _ in range(THREADS)]
        self.deferring: set[int] = set()
        self.exempt: set[str] = set()
        self.fingerprints = True
        self.scarce_host = self.margin = self.held = self.forked = False
        self.touched: set[Tag] = set()
        self.steps = 0
        self.last: dict[str, int] = {}
        self.before = self.place.figures()
        self.process.journal.start()
        self.process.sequences += 1

    # --- doing

    def begin(self, what: str, *arguments: Any) -> None:
        """Begin an operation and record its description."""
        self.steps += 1
        self.process.done[what] += 1
        self.last[what] = self.steps
        self.process.journal.note(f"{what} {arguments}")

    def is_rested(self, *names: str) -> bool:
        """Return whether all of these operations are long ago; this limits the share of cheap
        operations.
        """
        return all(self.steps - self.last.get(name, -REST) >= REST for name in names)

    def call(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        thread: int = 0,
        faults: tuple[Injection, ...] = (),
        may: tuple[type[MemsaverError], ...] = (),
        **named: Any,
    ) -> Outcome:
        """Make a call on a thread under faults; only errors in `may` and the faults' errors are
        allowed.
        """
        hand = self.process.hands[thread]
        if faults:
            self.land()
        if self.held:
            self._let_go_soon()
        outcome = attempt(
            self.process.system,
            faults,
            lambda: hand.do(lambda: function(*arguments, **named)),
            may,
        )
        emit_warnings()
        if outcome.met:
            self.process.met += 1
            self.exempt |= outcome.exempt
        if outcome.may_defer:
            self.deferring |= set(range(DEVICES))
        elif not self.deferring and not outcome.met:
            require(not self.process.warned, f"a warning: {self.process.warned}")
        self.process.warned.clear()
        if outcome.error is not None:
            self.process.failed[type(outcome.error).__name__] += 1
        return outcome

    def refused(self, kind: Any, function: Callable[..., Any], *a: Any, **k: Any) -> Any:
        """Make a call that must raise one of these errors and change nothing; return the error."""
        error = self.call(function, *a, may=(kind,), **k).error
        require(isinstance(error, kind), f"not refused: {function} {a} {k}")
        return error

    def hold(self) -> None:
        """Keep device work running until a call waits for it or the next operation begins."""
        self.sim.hold_streams(True)
        self.held = True

    def work_on(self, allocation: Allocation, value: int) -> None:
        """Submit device work that is still running when the next call begins."""
        self.begin("write_on_the_device", allocation.tag.name, allocation.nbytes, value)
        self.land()
        self.hold()
        stream = self.place.streams[allocation.device]
        self.sim.memset(allocation.address, value, allocation.nbytes, stream)
        allocation.set(value)
        allocation.tag.known = None
        self.touched.add(allocation.tag)

    def let_go(self) -> None:
        if self.held:
            self.sim.hold_streams(False)
            self.held = False
            self.place.synchronize()

    def _let_go_soon(self) -> None:
        self.held = False

        def later() -> None:
            time.sleep(_HELD_SECONDS)
            self.sim.hold_streams(False)

        # Does not wait: the call under test is made during this work.
        self.process.helper.start(later)

    def synchronize(self) -> None:
        self.let_go()
        self.process.helper.join()
        self.place.synchronize()

    def land(self, tags: Iterable[Tag] | None = None) -> None:
        """Wait for the pending transitions of these tags or of all tags."""
        wanted = set(self.tags if tags is None else tags)
        if self.flying:
            self.let_go()
        for flight in list(self.flying):
            _, handle, concerned = flight
            if wanted & set(concerned):
                handle.wait()
                self.flying.remove(flight)
                self.touched |= set(concerned)

    # --- the model

    @property
    def fill(self) -> int:
        return 0xFF if self.poison else 0

    def live_bytes(self) -> int:
        return sum(tag.nbytes() for tag in self.tags)

    def allocations(self, *, mapped: bool | None = None) -> list[Allocation]:
        return [
            allocation
            for tag in self.tags
            if mapped is None or tag.paused != mapped
            for allocation in tag.allocations
        ]

    def named(self, names: tuple[str, ...]) -> list[Tag]:
        """Return the tags that a call selects; a call without names selects all tags."""
        return [tag for tag in self.tags if tag.name in names or not names]

    def come_back(self, tags: Iterable[Tag]) -> None:
        """Update the model for mapped tags and rewrite unknown contents."""
        for tag in tags:
            if tag.paused:
                tag.resume(self.fill)
        self.rewrite_unknown(tags)

    def rewrite_unknown(self, tags: Iterable[Tag]) -> None:
        unknown = [tag for tag in tags if tag.unknown and not tag.paused]
        if unknown:
            self.synchronize()  # the program's own work may still write to it
        for tag in unknown:
            tag.unknown, tag.known = False, None
            for each in tag.allocations:
                self.place.fill(each.address, each.contents, 0, each.nbytes, self.steps)

    # --- comparing

    def compare(self) -> None:
        """After every operation, compare all state that no transition is changing."""
        wholly = self.steps % WHOLLY_EVERY == 0
        if wholly:
            self.land()
        if self.held:
            return
        self.synchronize()
        busy = {tag for *_, tags in self.flying for tag in tags}
        reachable = set()
        for tag in self.tags:
            if tag not in busy:
                reachable |= check_tag(self.place, tag, wholly=wholly or tag in self.touched)
                self.touched.discard(tag)
        if busy:
            held = self.deferring or any(tag.retained or tag.owing for tag in self.tags)
            require(held or not reachable, f"paused memory is there: {reachable}")
        else:
            check_statistics(self.place, self.tags, self.deferring, reachable)
            for tag in self.tags[self.steps % len(self.tags) :][:1]:
                for allocation in tag.allocations[:1]:
                    check_location(allocation, self.steps * 997 % allocation.nbytes)
        violations = self.sim.violations()
        require(not violations, f"the driver: {violations}")

    def teardown(self) -> None:
        """Restore, check and free everything; check that nothing is left."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception):
            if not isinstance(error, HypothesisException):
                self.process.journal.keep(error)
            self._abandon()
            return
        self.land()
        self.let_go()
        self.synchronize()
        self._reset()
        self.poison = False
        for thread in range(THREADS):
            while self.stacks[thread]:
                self.leave_innermost(thread)
        memsaver.resume()
        self.come_back(self.tags)
        self.deferring.clear()
        self.process.warned.clear()
        for tag in self.tags:
            check_tag(self.place, tag, wholly=True)
            for allocation in list(tag.allocations):
                _C.free(allocation.address)
            tag.allocations.clear()
            tag.owing = False
        self._collect()
        memsaver.trim(wait=True)
        check_statistics(self.place, self.tags, set(), set())
        after = self.place.figures()
        left = {
            name: (self.before[name], value)
            for name, value in after.items()
            if value > self.before[name] and name not in self.exempt
        }
        require(not left, f"left over: {left}")

    def leave_innermost(self, thread: int) -> None:
        entered, tag = self.stacks[thread].pop()
        self.call(entered.__exit__, None, None, None, thread=thread)
        if tag is not None:
            tag.regions -= 1

    def _abandon(self) -> None:
        """After a failure, end the transitions in progress and leave all regions."""
        self.sim.hold_streams(False)
        self.process.system.clear()
        for _, handle, _ in self.flying:
            with contextlib.suppress(MemsaverError):
                handle.wait()
        for hand, stack in zip(self.process.hands, self.stacks, strict=True):
            for entered, _ in reversed(stack):
                with contextlib.suppress(MemsaverError):
                    hand.do(lambda entered=entered: entered.__exit__(None, None, None))

    def _collect(self) -> None:
        """Retry failed releases by changing each tag."""
        for name in NAMES:
            with memsaver.region(name):
                for device in range(DEVICES):
                    _C.free(_C.malloc(4096, device))

    def _reset(self) -> None:
        self.process.system.clear()
        self.sim.hold_streams(False)
        memsaver.configure(**DEFAULTS)
        for device in range(DEVICES):
            self.place.leave(device, None)

    def _recover(self) -> None:
        """Clean up after a failed sequence that was not torn down."""
        self._reset()
        try:
            for hand in self.process.hands:
                while hand.do(_C.region_depth):
                    hand.do(_C.region_exit)
                hand.do(lambda: regions._entered.stack.clear())
            memsaver.resume()
            for name in NAMES:
                if name in {row.tag for row in memsaver.stats().tags}:
                    for address, _ in memsaver.ranges(name):
                        _C.free(address)
            self._collect()
            memsaver.trim(wait=True)
        except MemsaverError as error:
            self.process.journal.note(f"what an earlier sequence left does not go: {error}")
        emit_warnings()
        self.process.warned.clear()
        self.sim.clear_violations()
