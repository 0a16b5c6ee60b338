"""A random walk over all operations on tags, which checks every step's guarantees."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable

import memsaver
from memsaver.errors import (
    InvalidStateError,
    MemsaverWarning,
)
from soak.memory import GIB, Memory
from soak.model import Piece, SoakedTag, Wrong
from soak.transitions import CheckedTransitions
from soak.turnstile import Turnstile

KINDS = {"kv": "none", "activations": "none", "weights": "host", "optimizer": "host"}
KINDS |= {"frozen": "pageable", "spilled": "disk"}
GRAPHS = "graphs"


class Walk(CheckedTransitions):
    """One process's random walk. `finish` frees all memory. The walk can continue afterwards."""

    def __init__(self, memory: Memory, seed: int, turnstile: Turnstile) -> None:
        super().__init__(memory, random.Random(seed))
        self._turnstile = turnstile
        self._tags = [
            SoakedTag(name, kind, memory.limits.tag[kind]) for name, kind in KINDS.items()
        ]
        if memory.has_graphs:
            self._tags.append(SoakedTag(GRAPHS, "none", 0))
        memsaver.configure(host_bytes=memory.limits.host)
        if memory.has_graphs:  # memory for captures and kernels
            memsaver.configure(margin_bytes=GIB)

    @property
    def fingerprinted_bytes(self) -> int:
        return self._digests.bytes

    def warm_up(self) -> None:
        """Use every kind of backup and run every kind of step a few times."""
        for tag in self._tags[: len(KINDS)]:
            with memsaver.region(tag.name, backup=tag.backup):
                tag.known = True
                tag.pieces = [Piece(self._memory, self._digests, tag.cap // 16 & ~7)]
            self._pause([tag], None)
            self._resume([tag])
        for _ in range(4):
            for step, _ in self._steps():
                self._do(step)
        self.finish()

    def run(self, seconds: float, most: int) -> None:
        """Walk for `seconds` seconds or `most` steps, whichever ends first."""
        steps = self._steps()
        choices, weights = [step for step, _ in steps], [weight for _, weight in steps]
        end = time.monotonic() + seconds
        for _ in range(most):
            if time.monotonic() > end:
                break
            self._do(self._random.choices(choices, weights)[0])
        self._memory.let_go()

    def finish(self, patience: float = 100) -> None:
        """Resume, check and free everything. Raises Wrong on failure."""
        deadline = time.monotonic() + patience
        left = self._known()
        while left:
            # Mapped tags first; tags without enough memory again after others are freed.
            for tag in sorted(left, key=lambda tag: tag.state != "mapped"):
                if tag.state == "paused" and not self._resume([tag]):
                    continue
                tag.check_mapped()
                self._check_graph(tag)
                tag.pieces.clear()
                tag.drop_graph()
                left.remove(tag)
            self._make_room()
            if time.monotonic() > deadline:
                raise Wrong(f"no resume in {patience:.0f} s: {self._last_error}")
        for what in list(self._pending):
            self._succeeded(what)  # all contents were checked above
        if memsaver.stats().resident_bytes != 0:
            raise Wrong(
                f"memory is held when all is deleted: {memsaver.stats().tags}; "
                f"warned before: {dict(self.warned)}; kept by: {self._memory.kept()}"
            )

    # Steps.

    def _steps(self) -> list[tuple[Callable[[], None], int]]:
        """Return the possible steps with their weights."""
        steps = [
            (self.create, 10),
            (self.delete, 5),
            (self.refill, 6),
            (self.pause, 10),
            (self.resume, 12),
            (self.swap, 8),
            (self.pause_for_a_block, 4),
            (self.in_the_background, 6),
            (self.take, 3),
            (self.let_go, 2),
            (self.trim, 1),
            (self.tidy, 1),
        ]
        if self._memory.has_graphs:
            steps += [(self.replay, 4), (self.capture, 1), (self.drop_graph, 1)]
        return steps

    def _do(self, step: Callable[[], None]) -> None:
        self.operations[step.__name__] += 1
        with self._turnstile.passing(alone=step.__name__ == "capture"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", MemsaverWarning)
                step()
        self.warned.update(str(w.message)[:60] for w in caught if w.category is MemsaverWarning)
        self._random.choice(self._tags[: len(KINDS)]).check_explained(self._random)
        if self._memory.violations():
            raise Wrong(f"after {step.__name__}: {self._memory.violations()}")

    def create(self) -> None:
        """Create tensors. The allocation must fail while the tensors' tag is paused."""
        tag = self._any()
        try:
            with memsaver.region(tag.name, backup=tag.backup):
                tag.known = True
                for _ in range(self._random.randint(1, 4)):
                    nbytes = self._size(tag)
                    if self._total() + nbytes > self._memory.limits.budget:
                        break
                    if tag.nbytes + nbytes > tag.cap:
                        break
                    tag.pieces.append(Piece(self._memory, self._digests, nbytes))
        except InvalidStateError as error:
            if tag.state == "mapped":
                raise Wrong(f"a region of {tag.name} was refused") from error
            self._met(error, "create")
            self._succeeded("create")  # expected
        except Exception as error:
            if not self._is_expected(error):
                raise
            self._met(error, "create")
            self._memory.let_go()
            self._memory.tidy()
        else:
            self._succeeded("create")

    def delete(self) -> None:
        """Delete tensors, which is permitted in any state."""
        tag = self._any()
        keep = self._random.random() ** 0.25
        tag.pieces = [piece for piece in tag.pieces if self._random.random() < keep]

    def refill(self) -> None:
        """Write new contents to some tensors, so that some pages have changed before the next
        pause.
        """
        tag = self._any()
        if tag.known and tag.state == "mapped":
            for piece in tag.pieces:
                if self._random.random() < 0.5:
                    piece.fill()

    def pause(self) -> None:
        self._pause(self._several(), self._override())

    def resume(self) -> None:
        tags = self._several()
        for attempt in range(3):
            if self._resume(tags):
                return
            self._make_room()
            others = [tag for tag in self._known() if tag not in tags]
            if attempt == 0 and others:
                self._pause([self._random.choice(others)], None)

    def swap(self) -> None:
        both = self._several(most=4)
        if len(both) > 1:
            cut = self._random.randint(1, len(both) - 1)
            self._swap(both[:cut], both[cut:], self._override())

    def pause_for_a_block(self) -> None:
        """Use `paused()` for a block in which another process uses the memory."""
        tags = self._several()
        going = [tag for tag in tags if tag.state == "mapped"]
        left = False
        try:
            with memsaver.paused(*[tag.name for tag in tags]) as report:
                self._count(report)
                for tag in going:
                    self._must_be(tag, "paused")
                    tag.was_paused(None)
                left = True
        except Exception as error:
            if not self._is_expected(error):
                raise
            self._met(error, going[0].name if going else "nothing")
            for tag in going:
                if not left:
                    tag.check_mapped()  # the pause failed
                else:
                    self._must_be(tag, "paused")
        else:
            for tag in going:
                self._came_back(tag)

    def in_the_background(self) -> None:
        """Run a transition on another thread while tensors of its tags are deleted."""
        tag = self._random.choice(self._known() or self._tags[:1])
        if not tag.known:
            return
        pausing = tag.state == "mapped"
        if not pausing and tag.state != "paused":
            raise Wrong(f"{tag.name} is {tag.state}, and nothing is under way")
        try:
            call = memsaver.pause if pausing else memsaver.resume
            transition = call(tag.name, wait=False)
            if tag.pieces:
                tag.pieces.pop(self._random.randrange(len(tag.pieces)))
            if self._random.random() < 0.5:
                self._memory.wait_stream(transition)
            report = transition.wait()
        except Exception as error:
            if not self._is_expected(error):
                raise
            self._met(error, tag.name)
            if pausing:
                tag.check_mapped()
            else:
                self._must_be(tag, "paused")
            return
        self._count(report)
        self._must_be(tag, "paused" if pausing else "mapped")
        if pausing:
            tag.was_paused(None)
            self._succeeded(tag.name)
        else:
            self._came_back(tag)

    def take(self) -> None:
        """Allocate most of the free memory, as another process would."""
        limits = self._memory.limits
        room = min(memsaver.device_memory(0)[0] - limits.leave, limits.budget)
        try:
            if room > 0:
                self._memory.take(int(room * self._random.uniform(0.6, 1)))
        except RuntimeError as error:
            if not self._memory.is_out_of_memory(error):
                raise
            self._met(error, "take")  # the other process was quicker
            self._succeeded("take")

    def let_go(self) -> None:
        self._memory.let_go()

    def trim(self) -> None:
        memsaver.trim(wait=self._random.random() < 0.5)

    def tidy(self) -> None:
        self._memory.tidy()

    def capture(self) -> None:
        """Replace the graph with a new graph. The other process is idle during the capture."""
        tag = self._tags[-1]
        if tag.known and tag.state != "mapped":
            return
        self._memory.let_go()
        if memsaver.device_memory(0)[0] < 2 * GIB:
            return
        tag.backup = self._random.choice(["none", "host"])
        tag.drop_graph()
        self._memory.tidy()
        tag.graph = self._memory.capture(tag.name, tag.backup)  # type: ignore[union-attr]
        tag.known = True

    def replay(self) -> None:
        tag = self._tags[-1]
        if tag.known and tag.state == "mapped":
            self._check_graph(tag)

    def drop_graph(self) -> None:
        self._tags[-1].drop_graph()

    def _make_room(self) -> None:
        """Free device and host memory as the errors advise; another process might allocate it
        first.
        """
        self._memory.let_go()
        self._memory.tidy()
        memsaver.trim(wait=True)
        time.sleep(self._random.random() * 0.05)

    # Choices.

    def _known(self) -> list[SoakedTag]:
        return [tag for tag in self._tags if tag.known]

    def _any(self) -> SoakedTag:
        return self._random.choice(self._tags[: len(KINDS)])

    def _several(self, most: int = 3) -> list[SoakedTag]:
        known = self._known()
        return self._random.sample(known, min(len(known), self._random.randint(1, most)))

    def _override(self) -> str | None:
        if self._random.random() < 0.9:
            return None
        return self._random.choice(["none", "host", "pageable", "disk"])

    def _size(self, tag: SoakedTag) -> int:
        """Return a size of any magnitude that is a multiple of 8; large sizes are more frequent."""
        most = min(self._memory.limits.tensor, tag.cap // 2)
        return max(int(512 * (most / 512) ** self._random.random() ** 0.5) & ~7, 8)

    def _total(self) -> int:
        return sum(tag.nbytes for tag in self._tags)
