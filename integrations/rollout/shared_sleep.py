"""`SharedSleep`: an engine's sleep for all ranks of its group, and what each knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from memsaver.distributed.errors import GroupError, RankError
from memsaver.distributed.words import side
from memsaver.errors import InvalidStateError, MemsaverError
from memsaver.integrations.rollout.backend import Backend
from memsaver.integrations.rollout.fence import Fence
from memsaver.integrations.rollout.together import Together
from memsaver.integrations.sglang.protocol import RESUME_ORDER, WEIGHTS
from memsaver.integrations.sglang.status import Status, needs_of, status_of
from memsaver.interrupts import collective_block, signals_deferred
from memsaver.timeouts import check_timeout, is_timeout

if TYPE_CHECKING:
    from memsaver.integrations.sglang.reports import SleepReport

__all__ = ["SharedSleep", "known_released"]

Result = TypeVar("Result")


class SharedSleep:
    """Sleep and wake-up as collectives of a group whose leader has the engine.

    The base of `RolloutEngine`, which gives it what follows.

    Attributes:
        together: for calls of the group's ranks.
        timeout: seconds that a call may take unless it says otherwise.
    """

    together: Together
    timeout: float
    _fence: Fence
    _released: frozenset[str] | None  # as of the last call; None is unknown

    @property
    def _engine(self) -> Backend:
        """The leader's. Only what the leader does for all asks for it."""
        raise NotImplementedError

    def _check_open(self) -> None:
        """Raise `InvalidStateError` where it is closed."""
        raise NotImplementedError

    @property
    def status(self) -> Status:
        """What of the engine's memory is there, as of the last call. No collective."""
        return Status.UNKNOWN if self._released is None else status_of(self._released)

    @property
    def released(self) -> frozenset[str]:
        """The tags that are released, as of the last call. No collective."""
        return self._released or frozenset()

    def refresh(self) -> Status:
        """Ask the engine for its state: others may have changed it. A collective."""
        self._change("refresh", lambda control, _: control.refresh(), None, "")
        return self.status

    def check(self, operation: str) -> None:
        """Raise `InvalidStateError` where the engine would not survive it. No collective.

        Args:
            operation: "generate" or "update_weights".
        """
        self._check_open()
        needed = needs_of(operation)
        if self._released is None:
            raise InvalidStateError(f"the engine is in an unknown state: it cannot {operation} now")
        missing = [tag for tag in RESUME_ORDER if tag in self._released & needed]
        if missing:
            raise InvalidStateError(
                f"the engine cannot {operation} while {', '.join(missing)} is released; wake it up "
                "first",
                tag=missing[0],
            )

    def sleep(
        self,
        tags: str | Sequence[str] | None = None,
        *,
        wait_idle: bool = False,
        abort: bool = False,
        flush: bool = False,
        fence: bool = False,
        timeout: float | None = None,
    ) -> SleepReport:
        """Give the memory of `tags` back on all GPUs of the group. A collective.

        What it does, its other arguments and its errors are those of
        `memsaver.integrations.sglang.SleepController.sleep`.

        Args:
            tags: a tag, or several; None is all of them.
            wait_idle: wait until no request is in flight, instead of refusing.
            abort: abort the requests in flight, and wait for their end.
            flush: flush the prefix cache also where only other tags are released.
            fence: wait for the engines of all other groups of the mesh, too, and raise where one of
                them failed; those that did not fail sleep then, and the call can be made again. All
                ranks of the mesh call.
            timeout: seconds for all of it.
        """
        options = {"wait_idle": wait_idle, "abort": abort, "flush": flush}
        what = f"sleep({_words(tags)})"
        return self._change(
            what,
            lambda control, limit: control.sleep(tags, timeout=limit, **options),
            timeout,
            what if fence else "",
        )

    def wake_up(
        self,
        tags: str | Sequence[str] | None = None,
        *,
        fence: bool = False,
        timeout: float | None = None,
    ) -> SleepReport:
        """Take memory for `tags` again on all GPUs of the group. A collective.

        What it does and its errors are those of
        `memsaver.integrations.sglang.SleepController.wake_up`.

        Args:
            tags: a tag, or several; None is all that are released.
            fence: as of `sleep`.
            timeout: seconds for all of it.
        """
        what = f"wake_up({_words(tags)})"
        return self._wake_up(what, tags, timeout, what if fence else "")

    @collective_block
    def asleep(
        self, tags: str | Sequence[str] | None = None, *, fence: bool = False, **options: Any
    ) -> Iterator[SleepReport]:
        """Sleep for the block, and wake what went to sleep at its end, also after an exception.

        Args and errors are those of `sleep` and `wake_up`. Yields the report of `sleep`. Where the
        block fails on one rank, the engine wakes on all, and only that one raises.
        """
        timeout = options.get("timeout")
        report = self.sleep(tags, fence=fence, **options)
        try:
            yield report
        finally:
            # Engines that were not awake before have less to wake than others, which they meet.
            end = "the end of asleep" if fence else ""
            if report.changed:
                what = f"wake_up({_words(report.changed)})"
                self._wake_up(what, report.changed, timeout, end)
            elif fence:
                self._fence.meet(end, None, self._limit(timeout))

    @collective_block
    def staged_wake(
        self, *, fence: bool = False, timeout: float | None = None
    ) -> Iterator[list[SleepReport]]:
        """Wake the weights for the block, which updates them, and the rest when all ranks are done.

        So the memory of the KV cache and the graphs is needed only when the blocks of all ranks
        have given up their copies of the weights. Where a block fails, every rank raises, the rest
        sleeps on, and the weights are there: update them again and `wake_up()`, or `sleep()`.

        Yields a list of the reports, which has the second one after the block.
        """
        reports = [self.wake_up(WEIGHTS, fence=fence, timeout=timeout)]
        what = "the block of staged_wake"
        try:
            yield reports
        except BaseException as error:
            self._tell(what, error, fence)
            raise
        self._tell(what, None, fence)
        reports.append(self.wake_up(fence=fence, timeout=timeout))

    # --- on all ranks -----------------------------------------------------------------------------

    def _check_call(self, limit: float) -> None:
        """Raise where a call of so many seconds cannot be made here, for all ranks to hear."""
        self._check_open()
        check_timeout(limit)

    def _limit(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    def _do(self, what: str, action: Callable[[], Result], limit: float) -> Result:
        result: Result = self.together.gathered(
            what, lambda: self._check_call(limit), lambda _: action(), limit
        )
        return result

    def _wake_up(
        self, what: str, tags: str | Sequence[str] | None, timeout: float | None, fence: str
    ) -> Any:
        """`wake_up`, in words for this engine's ranks and for those of all."""
        return self._change(
            what, lambda control, limit: control.wake_up(tags, timeout=limit), timeout, fence
        )

    @signals_deferred()  # between the ranks of this engine and those of all
    def _change(
        self,
        what: str,
        action: Callable[[Any, float], Any],
        timeout: float | None,
        fence: str,
    ) -> Any:
        """A transition of the leader's engine, of which all ranks know what came of it.

        Args:
            what: the call in words, the same on all ranks of the engine.
            action: does it on the leader, within the seconds that it is given.
            timeout: seconds; None is the engine's.
            fence: the call in words that are the same on all ranks of the mesh; "" is no fence.
        """
        limit = self._limit(timeout)

        def work() -> tuple[Any, frozenset[str] | None]:
            engine = self._engine
            try:
                return action(engine.control, limit), known_released(engine)
            except MemsaverError as error:
                vars(error)["released"] = known_released(engine)  # for the other ranks
                raise

        report: Any = None
        failure: BaseException | None = None
        try:
            report, self._released = self._do(what, work, limit)
        except BaseException as error:  # where it is an interrupt, the others wait all the same
            failure = error
            self._released = self._after(error)
        if fence:  # the limit may be what is wrong with the call
            self._fence.meet(fence, failure, limit if is_timeout(limit) else None)
        if failure is not None:
            raise failure
        return report

    def _after(self, error: BaseException) -> frozenset[str] | None:
        """What is released after a failure, None where it is not known."""
        if isinstance(error, RankError | GroupError) or not isinstance(error, MemsaverError):
            return None
        released: frozenset[str] | None = vars(error).get("released", self._released)
        return released

    def _tell(self, what: str, error: BaseException | None, fence: bool) -> None:
        """Wait for all ranks' blocks, and raise where one failed, but not this one's own error."""
        failure: BaseException | None = None
        try:
            self.together.meet(what, error)
        except BaseException as told:
            failure = told
        if fence:
            try:
                self._fence.meet(what, failure)
            except BaseException as told:
                failure = told
        if failure is not None and error is None:
            raise failure


def known_released(backend: Backend) -> frozenset[str] | None:
    """The tags that are released; None where it is not known."""
    control = backend.control
    return None if control.status is Status.UNKNOWN else frozenset(control.released)


def _words(tags: object) -> str:
    """Return tags in words, whatever they are."""
    return "" if tags is None else side(tags).strip("[]")
