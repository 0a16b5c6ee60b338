"""`SharedSleep`: the sleep and wake-up of a leader's engine, as collective calls of the group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from memsaver._runtime.interrupts import collective_block, signals_deferred
from memsaver._runtime.timeouts import check_timeout, is_timeout
from memsaver.distributed.errors import GroupError, RankError
from memsaver.distributed.words import side
from memsaver.errors import MemsaverError

from ..engine.interface import Backend
from ..engine.status import Status, check_operation, status_of
from ..engine.tags import WEIGHTS, Tags
from .fence import Fence
from .ranks import Layout
from .together import Together

if TYPE_CHECKING:
    from ..engine.reports import SleepReport
    from ..engine.sleep import EngineController

__all__ = ["SharedSleep", "known_released"]

Result = TypeVar("Result")


class SharedSleep:
    """The sleep and wake-up of an engine as collective calls of a group.

    The group's leader owns the engine.

    This is a base class of `RolloutEngine`, which sets the attributes.

    Attributes:
        layout: the place of this rank among the ranks of all engines.
        together: the connection for collective calls of the group's ranks.
        timeout: the default timeout of calls, in seconds.
    """

    layout: Layout
    together: Together
    timeout: float
    _fence: Fence
    _released: frozenset[str] | None  # the released tags after the last call; None if unknown

    @property
    def _engine(self) -> Backend:
        """The leader's engine, for operations that the leader performs for all ranks."""
        raise NotImplementedError

    def _check_open(self) -> None:
        """Raise `InvalidStateError` if this object is closed."""
        raise NotImplementedError

    @property
    def status(self) -> Status:
        """The engine's status after the last call. Not a collective."""
        return status_of(self._released)

    @property
    def released(self) -> frozenset[str]:
        """The released tags after the last call. Not a collective."""
        return self._released or frozenset()

    def refresh(self) -> Status:
        """Query the engine's state, because other clients can change it. A collective."""
        self._change("refresh", lambda control, _: control.refresh(), None, "")
        return self.status

    def check(self, operation: str) -> None:
        """Raise `InvalidStateError` if an operation would crash the engine in its current state.

        This is not a collective call.

        Args:
            operation: "generate" or "update_weights".
        """
        self._check_open()
        check_operation(operation, self._released)

    def sleep(
        self,
        tags: Tags = None,
        *,
        wait_idle: bool = False,
        abort: bool = False,
        flush: bool = False,
        keep_weights: bool = True,
        fence: bool = False,
        timeout: float | None = None,
    ) -> SleepReport:
        """Release the memory of `tags` on all GPUs of the group. A collective.

        See `memsaver.integrations.sglang.SleepController.sleep` for the errors.

        Args:
            tags: a tag or several tags; None means all tags.
            wait_idle: whether to wait until no request is in flight, instead of raising an error.
            abort: whether to abort the requests in flight and wait until they have ended.
            flush: whether to flush the prefix cache even if only other tags are released.
            keep_weights: False if all weights will be sent again before they are used, in which
                case the engine need not save the weights.
            fence: whether to also wait for the engines of the mesh's other groups, and raise an
                error if any of them failed. After such an error, the engines that did not fail are
                asleep, and the call can be repeated. All ranks of the mesh must make the call.
            timeout: the time limit for the whole call in seconds; None means the engine's timeout.
        """
        return self._sleep(
            tags,
            fence,
            timeout,
            None,
            wait_idle=wait_idle,
            abort=abort,
            flush=flush,
            keep_weights=keep_weights,
        )

    def wake_up(
        self,
        tags: Tags = None,
        *,
        keep_weights: bool = True,
        fence: bool = False,
        timeout: float | None = None,
    ) -> SleepReport:
        """Allocate memory for released `tags` again on all GPUs of the group. A collective.

        See `memsaver.integrations.sglang.SleepController.wake_up` for the errors.

        Args:
            tags: a tag or several tags; None means all released tags.
            keep_weights: False if all weights will be sent again before they are used, in which
                case the engine need not restore the weights.
            fence: see `sleep`.
            timeout: see `sleep`.
        """
        what = f"wake_up({_words(tags)})"
        return self._wake_up(what, tags, timeout, what if fence else "", keep_weights)

    @collective_block
    def asleep(
        self, tags: Tags = None, *, fence: bool = False, **options: Any
    ) -> Iterator[SleepReport]:
        """Put the engine to sleep during the block.

        The same tags are woken at the end of the block, even after an exception.

        The arguments and errors are those of `sleep` and `wake_up`. The context manager yields the
        report of `sleep`. If the block fails on one rank, the engine is woken on all ranks, and
        only the failed rank raises the exception. With `fence`, if the sleep of another engine
        fails, this engine is woken within the timeout of `wake_up` before the error is raised, and
        the error's message contains this engine's state.
        """
        timeout = options.pop("timeout", None)

        def undo(report: SleepReport | None, error: BaseException) -> None:
            self._undo_sleep(report, error, timeout, options.get("keep_weights", True))

        report = self._sleep(tags, fence, timeout, undo, **options)
        try:
            yield report
        finally:
            # Engines that were already asleep have fewer tags to wake, but still join the barrier.
            end = "the end of asleep" if fence else ""
            if report.changed:
                what = f"wake_up({_words(report.changed)})"
                self._wake_up(what, report.changed, timeout, end)
            elif fence:
                self._fence.wait(end, None, self._limit(timeout))

    @collective_block
    def staged_wake(
        self, *, fence: bool = False, timeout: float | None = None
    ) -> Iterator[list[SleepReport]]:
        """Wake the weights before a block that updates them; wake the other tags after the block.

        The other tags are woken after the blocks of all ranks end. The KV cache and the graphs can
        therefore use the memory that the blocks of all ranks need for copies of the weights. If a
        block fails, every rank raises an error, the weights are mapped, and the other tags stay
        released. Recover by updating the weights again and calling `wake_up()`, or by calling
        `sleep()`.

        The context manager yields a list of the two wake-up reports; the second report is appended
        after the block.
        """
        reports = [self.wake_up(WEIGHTS, fence=fence, timeout=timeout)]
        what = "the block of staged_wake"
        try:
            yield reports
        except BaseException as error:
            self._conclude(what, error, fence)
            raise
        self._conclude(what, None, fence)
        reports.append(self.wake_up(fence=fence, timeout=timeout))

    # --- on all ranks -----------------------------------------------------------------------------

    def _check_call(self, limit: float) -> None:
        """Raise an error if this rank cannot make a call with this timeout."""
        self._check_open()
        check_timeout(limit)

    def _limit(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else timeout

    def _do(self, what: str, action: Callable[[], Result], limit: float) -> Result:
        return self.together.gathered(
            what, lambda: self._check_call(limit), lambda _: action(), limit
        )

    def _sleep(
        self,
        tags: Tags,
        fence: bool,
        timeout: float | None,
        undo: Callable[[SleepReport | None, BaseException], None] | None,
        *,
        wait_idle: bool = False,
        abort: bool = False,
        flush: bool = False,
        keep_weights: bool = True,
    ) -> SleepReport:
        """Run `sleep`; see `_change` for `undo`."""
        options = {"wait_idle": wait_idle, "abort": abort, "flush": flush}
        if not keep_weights:
            options["keep_weights"] = False
        what = f"sleep({_words(tags)})"
        return self._change(
            what,
            lambda control, limit: control.sleep(tags, timeout=limit, **options),
            timeout,
            what if fence else "",
            undo,
        )

    def _wake_up(
        self,
        what: str,
        tags: Tags,
        timeout: float | None,
        fence: str,
        keep_weights: bool = True,
    ) -> SleepReport:
        """Run `wake_up`. In errors, `what` names the call for this engine's ranks, and `fence` for
        all ranks.
        """
        options = {} if keep_weights else {"keep_weights": False}
        return self._change(
            what,
            lambda control, limit: control.wake_up(tags, timeout=limit, **options),
            timeout,
            fence,
        )

    @signals_deferred()  # no handler may run between the engine's call and the barrier
    def _change(
        self,
        what: str,
        action: Callable[[EngineController, float], Result],
        timeout: float | None,
        fence: str,
        undo: Callable[[Result | None, BaseException], None] | None = None,
    ) -> Result:
        """Change the state of the leader's engine, and store the new state on all ranks.

        Args:
            what: a description of the call, the same on all ranks of the engine.
            action: the function that makes the change, which is called on the leader with its
                timeout.
            timeout: the time limit in seconds; None means the engine's timeout.
            fence: a description of the call for the barrier, the same on all ranks of the mesh; ""
                if no barrier is wanted.
            undo: the function that is called on all ranks of the engine before the barrier's error
                is raised. The function's arguments are the result of the change (None if the change
                failed) and the error.
        """
        limit = self._limit(timeout)

        def work() -> tuple[Result, frozenset[str] | None]:
            engine = self._engine
            try:
                return action(engine.control, limit), known_released(engine)
            except MemsaverError as error:
                vars(error)["released"] = known_released(engine)  # for other ranks
                raise

        report: Result | None = None
        failure: BaseException | None = None
        try:
            report, self._released = self._do(what, work, limit)
        except BaseException as error:  # the other ranks wait even after an interrupt
            failure = error
            self._released = self._after(error)
        if fence:  # the limit itself may be the invalid argument
            try:
                self._fence.wait(fence, failure, limit if is_timeout(limit) else None)
            except BaseException as error:
                if undo is not None and self.layout.dp_size > 1:
                    undo(report, error)
                raise
        if failure is not None:
            raise failure
        return cast(Result, report)

    def _undo_sleep(
        self,
        report: SleepReport | None,
        error: BaseException,
        timeout: float | None,
        keeps_weights: bool,
    ) -> None:
        """Wake the tags that a sleep has released, and add the engine's state to an error.

        Args:
            report: the report of the sleep; None if the sleep failed and no tag needs to be woken.
            error: the error; if it is a `MemsaverError`, the state is added to its message.
            timeout: the time limit for the wake-up in seconds; None means the engine's timeout.
            keeps_weights: whether the sleep saved the weights.
        """
        done, then = "", ""
        if report is not None and report.changed:
            done = " fell asleep and was woken again"
            try:
                self._wake_up(f"wake_up({_words(report.changed)})", report.changed, timeout, "")
            except Exception as failure:
                done, then = f" fell asleep and could not be woken ({failure})", "; call wake_up()"
        if isinstance(error, MemsaverError):
            tags = self._released
            released = "unknown" if tags is None else ", ".join(sorted(tags)) or "none"
            if report is not None and WEIGHTS in report.changed and not keeps_weights:
                then += "; its weights were not kept: update them"
            own = f"engine {self.layout.dp_rank}{done}"
            error.message += f"; {own}: released tags: {released}{then}"

    def _after(self, error: BaseException) -> frozenset[str] | None:
        """Return the released tags after a failure; None if the tags are unknown."""
        if isinstance(error, RankError | GroupError) or not isinstance(error, MemsaverError):
            return None
        released: frozenset[str] | None = vars(error).get("released", self._released)
        return released

    def _conclude(self, what: str, error: BaseException | None, fence: bool) -> None:
        """Wait for the blocks of all ranks; raise an error if the block of another rank failed."""
        failure: BaseException | None = None
        try:
            self.together.wait(what, error)
        except BaseException as shared:
            failure = shared
        if fence:
            try:
                self._fence.wait(what, failure)
            except BaseException as shared:
                failure = shared
        if failure is not None and error is None:
            raise failure


def known_released(backend: Backend) -> frozenset[str] | None:
    """Return the tags that a backend has released; None if the tags are unknown."""
    control = backend.control
    return None if control.status is Status.UNKNOWN else frozenset(control.released)


def _words(tags: object) -> str:
    """Format tags for a message; invalid tags are accepted."""
    return "" if tags is None else side(tags).strip("[]")
