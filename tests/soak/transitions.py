"""The transitions of a walk, with checks of their guarantees and counts of events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import memsaver
from memsaver import State
from memsaver.errors import BackupError, DriverError, OutOfDeviceMemoryError, OutOfHostMemoryError
from soak.memory import Memory
from soak.model import UNKNOWN, Digests, SoakedTag, Wrong

SHORTAGES = (OutOfDeviceMemoryError, OutOfHostMemoryError, BackupError)


class CheckedTransitions:
    """Transitions that can fail under shortages and faults."""

    def __init__(self, memory: Memory, rng: random.Random) -> None:
        self._memory = memory
        self._random = rng
        self._digests = Digests(memory)
        self._pending: dict[str, Counter[str]] = {}  # errors not yet recovered, by the failed call
        self._last_error = ""
        self.reset()

    def reset(self) -> None:
        """Reset the counts."""
        self.operations: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        self.recovered: Counter[str] = Counter()
        self.warned: Counter[str] = Counter()
        self.cycles = 0  # tags that were paused and resumed, with their contents checked
        self.device_bytes = self.copied_bytes = 0
        self._digests.bytes = 0

    def _pause(self, tags: list[SoakedTag], backup: str | None) -> None:
        going = [tag for tag in tags if tag.state == "mapped"]

        def done() -> None:
            for tag in going:
                self._must_be(tag, "paused")
                tag.was_paused(backup)

        def failed() -> None:
            for tag in going:
                if tag.state == "mapped":
                    tag.check_mapped()  # otherwise its pages are retained with their contents

        self._attempt(
            lambda: memsaver.pause(*[tag.name for tag in tags], backup=backup), going, done, failed
        )

    def _resume(self, tags: list[SoakedTag]) -> bool:
        coming = [tag for tag in tags if tag.state == "paused"]

        def done() -> None:
            for tag in coming:
                self._came_back(tag)

        def failed() -> None:
            for tag in coming:
                self._must_be(tag, "paused")

        return self._attempt(
            lambda: memsaver.resume(*[tag.name for tag in tags]), coming, done, failed
        )

    def _swap(self, out: list[SoakedTag], into: list[SoakedTag], backup: str | None) -> None:
        going = [tag for tag in out if tag.state == "mapped"]
        coming = [tag for tag in into if tag.state == "paused"]

        def done() -> None:
            for tag in going:
                self._must_be(tag, "paused")
                tag.was_paused(backup)
            for tag in coming:
                self._came_back(tag)

        def failed() -> None:
            for tag in coming:
                self._must_be(tag, "paused")
            for tag in going:
                if (backup or tag.backup) == "none":
                    tag.contents = UNKNOWN  # a swap may lose only these contents
                if tag.state == "mapped":
                    tag.check_mapped()

        names = [[tag.name for tag in side] for side in (out, into)]
        self._attempt(
            lambda: memsaver.swap(out=names[0], into=names[1], backup=backup),
            [*going, *coming],
            done,
            failed,
        )

    def _attempt(
        self,
        call: Callable[[], memsaver.Report],
        changing: list[SoakedTag],
        done: Callable[[], None],
        failed: Callable[[], None],
    ) -> bool:
        """Make the call and check its guarantees; return whether the call succeeded."""
        name = changing[0].name if changing else "nothing"
        with self._memory.faults() as faulty:
            try:
                report = call()
            except Exception as error:
                if not self._is_expected(error) and not (faulty and isinstance(error, DriverError)):
                    raise
                failure: Exception | None = error
            else:
                failure = None
        if failure is not None:
            self._met(failure, name)
            del failure
            failed()
            return False
        self._count(report)
        done()
        for tag in changing:
            self._succeeded(tag.name)
        return True

    def _came_back(self, tag: SoakedTag) -> None:
        tag.check_mapped()
        self._check_graph(tag)
        self._succeeded(tag.name)
        self.cycles += 1

    def _must_be(self, tag: SoakedTag, state: State) -> None:
        if tag.state is not state:
            raise Wrong(f"{tag.name} is {tag.state}, and should be {state}")

    def _check_graph(self, tag: SoakedTag) -> None:
        if tag.graph is None:
            return
        found, expected = tag.graph.replay(self._random.randrange(1 << 30))
        nbytes = found.numel() * found.element_size()
        if self._digests.of(found, nbytes) != self._digests.of(expected, nbytes):
            raise Wrong("a replay computes something else")

    def _count(self, report: memsaver.Report) -> None:
        self.device_bytes += report.bytes
        self.copied_bytes += report.copied_bytes

    def _met(self, error: Exception, what: str) -> None:
        kind = type(error).__name__
        self._last_error = str(error)
        self.met[kind] += 1
        self._pending.setdefault(what, Counter())[kind] += 1

    def _succeeded(self, what: str) -> None:
        """Count a call's earlier errors as recovered, because the call has now succeeded."""
        self.recovered += self._pending.pop(what, Counter())

    def _is_expected(self, error: Exception) -> bool:
        return isinstance(error, SHORTAGES) or self._memory.is_out_of_memory(error)
