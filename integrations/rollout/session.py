"""`ColocatedSession`: a trainer and an engine on the same GPUs, in the order in which they fit."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from memsaver.errors import InvalidStateError, MemsaverError
from memsaver.integrations.rollout.engine import RolloutEngine
from memsaver.integrations.rollout.fence import Fence
from memsaver.integrations.rollout.low_water import LowWater
from memsaver.integrations.rollout.session_arguments import (
    check_options,
    group_of,
    layout_beside,
)
from memsaver.integrations.rollout.stages import RankStage, Stage, StageReport
from memsaver.integrations.rollout.together import GRACE_SECONDS, Together
from memsaver.integrations.rollout.trainer_memory import TrainerMemory
from memsaver.interrupts import collective_block, interrupts_deferred
from memsaver.statistics import stats
from memsaver.timeouts import check_timeout

__all__ = ["ColocatedSession", "Phase"]

_WEIGHTS = "weights"  # the engine's tag for them


class Phase(str, Enum):
    """What a session is at. Its values are their names in lower case."""

    IDLE = "idle"  # between blocks, also after an error
    MOVING = "moving"  # memory goes from one side to the other
    ROLLOUT = "rollout"  # in `with session.rollout()`
    TRAINING = "training"  # in `with session.training()`


class ColocatedSession:
    """Takes a trainer and an engine through their steps, each with the memory that the other gave.

        session = ColocatedSession(engine, model, optimizer)
        for step in range(steps):
            with session.rollout() as engine:  # the engine has the trainer's weights, and the GPU
                output = engine.generate(prompts, sampling)
            with session.training():  # the trainer has its weights, its states, and the GPU
                train(output)

    What happens between the blocks are the stages of `Stage`, in their order. Entering a rollout,
    the trainer's work is waited for on all ranks and torch's cache emptied; the optimizer is
    paused; the engine's weights wake, and are updated from the trainer's; the trainer's copy is
    paused; the KV cache and the graphs wake. At the end of the block the engine sleeps. Entering a
    training, the trainer's memory is resumed. What is as a stage wants it is left out: weights that
    the engine has already are not sent again.

    **Ranks.** On several ranks all calls are collectives of `group`, and so is making a session:
    every rank enters and leaves the same blocks. An invalid argument on one rank is an error on all
    of them at once. Stages end on all ranks together. Where one fails
    on a rank, every rank raises an error of the same kind (a `RankError`, where ranks fail
    differently), which names the ranks and says why. So does an exception that leaves a block on
    some ranks, at the end of the block; those ranks raise their own. An interrupt (Ctrl-C) counts
    as such a failure, also one that comes between two stages: its own rank raises it again.

    **Errors.** Nothing is lost. A stage that failed ends the call in front of it, the session is
    idle, and either block can be entered again: it does what has not been done. After a failed
    pause the trainer's memory is mapped, after a failed resume it is paused with its backup, and
    the engine is as its own error says. After an update that failed the engine's weights are
    unknown, and it is given to nobody until the next rollout has updated them; the trainer's are
    intact.
    After an exception in a rollout's block the engine stays awake; the next block sees to that.
    What was called out of order raises `InvalidStateError`, and nothing has changed.

    Gradients that exist when a rollout begins are kept with the optimizer, which costs time and
    host memory: `optimizer.zero_grad()` at the end of a step. One thread at a time. The weights are
    changed inside of `training()` only; whoever changes them elsewhere calls `weights_changed()`.

    Attributes:
        engine: the engine.
        stages: the reports of the latest rollout and what came after it, failed stages included.

    Args:
        engine: a `RolloutEngine`, or what has its `sleep`, `wake_up` and `update_weights`. It may
            be awake or asleep.
        model: the trainer's model, whose parameters and buffers go into the tag "model"; or the
            `Offloaded` of it.
        optimizer: its optimizer, or several, whose states and gradients go into the tag
            "optimizer"; or the `Offloaded` of it. None where there is none on the GPU.
        state: gives the weights to send, as `RolloutEngine.update_weights` takes them; None is
            `model.state_dict()`.
        tags: more tags of the trainer's that are paused and resumed with the optimizer, such as
            that of a reference model; the same on all ranks. Each is known and has a backup.
        group: a `torch.distributed` group of all ranks of the trainer; None is the world, or this
            process alone where torch.distributed is not initialised.
        backup: where the trainer's memory goes, as for `offload`. "none" is refused, because the
            contents are needed.
        sleep: False: nothing sleeps and nothing is paused, all else is done as with it, for
            comparing the two.
        engine_keeps_weights: the engine's weights survive its sleep (SGLang's
            `enable_weights_cpu_backup`), so that they are sent after a training only.
        update_options: for `RolloutEngine.update_weights`; or what gives them for each update, such
            as the version that the weights are to be called.
        timeout: seconds that a stage may take on each rank. One that fails at the end of them is
            waited for.
        block_timeout: seconds to wait for the other ranks at the beginning and the end of a block.
        on_stage: is told of each stage when it is over, failed ones included; must not raise.

    Raises:
        ConfigError: a model or an optimizer that cannot be offloaded, a tag without a backup, a bad
            option, or a `group` that is no process group. The other ranks learn of each of these.
        UnknownTagError: no region ever named one of `tags`.
        InvalidStateError: a handle or a group that is closed. This rank is not in `group`: an error
            of this rank alone, and the group's ranks wait for each other until `timeout`.
        GroupError: not all ranks made the session within `timeout`, or not on the same group.
        MemsaverError: what `offload` and `memsaver.distributed` raise, on all ranks.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        model: Any,
        optimizer: Any = None,
        *,
        state: Callable[[], Any] | None = None,
        tags: Sequence[str] = (),
        group: Any = None,
        backup: str | None = None,
        sleep: bool = True,
        engine_keeps_weights: bool = False,
        update_options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        timeout: float = 600.0,
        block_timeout: float = 1800.0,
        on_stage: Callable[[StageReport], object] | None = None,
    ) -> None:
        # No argument is looked at before all ranks can learn that it is invalid.
        made: list[TrainerMemory] = []
        options = {"tags": tags, "backup": backup, "timeout": timeout, "offloading": sleep}
        everyone = group_of(group)
        self._together = Together(everyone, timeout, "session")

        def begin() -> None:
            self._sleeps = bool(sleep)
            self._keeps = bool(engine_keeps_weights) or not self._sleeps
            check_options(state, model, engine, on_stage, update_options, self._sleeps)
            check_timeout(block_timeout, "block_timeout")
            made.append(TrainerMemory(model, optimizer, group=everyone, **options))

        with contextlib.ExitStack() as undo:
            undo.callback(self._together.close)
            undo.callback(lambda: [memory.undo() for memory in made])  # it failed on another rank
            self._together.gather("the beginning of a session", begin, timeout)
            layout = layout_beside(everyone)
            self._fence = Fence(layout, timeout)
            undo.pop_all()
        (self._trainer,) = made
        self.engine = engine
        self.stages: list[StageReport] = []
        self._state = state if state is not None else model.state_dict
        self._options = update_options if update_options is not None else {}
        self._timeout = timeout
        self._block_timeout = block_timeout
        self._on_stage = on_stage
        self._phase = Phase.IDLE
        self._owner = threading.Lock()  # held by whoever is in a block
        self._is_current = False  # whether the engine has the trainer's weights
        self._rank = layout.rank

    def __repr__(self) -> str:
        return f"<memsaver ColocatedSession: {self._phase.value}>"

    @property
    def phase(self) -> Phase:
        """What the session is at."""
        return self._phase

    @property
    def trainer_tags(self) -> tuple[str, ...]:
        """The trainer's tags, the model's first; () where nothing sleeps."""
        tags: tuple[str, ...] = self._trainer.tags
        return tags

    @property
    def engine_is_current(self) -> bool:
        """Whether the engine has the weights that the trainer has, as far as the session knows."""
        return self._is_current

    def weights_changed(self) -> None:
        """Say that the trainer's weights were changed outside of `training()`, on all ranks."""
        self._is_current = False

    @collective_block
    def rollout(self) -> Iterator[RolloutEngine]:
        """The engine has the GPU for the block, and the trainer's weights. Gives the engine.

        Raises:
            InvalidStateError: inside another block of this session; or the session or one of its
                handles is closed.
            ConfigError: a tag of the trainer's has lost its backup; nothing is paused.
            RankError: the block or a stage failed on some ranks, or they called different things.
            GroupError: a rank died, hangs, or did not come in time; start the job again.
            OutOfDeviceMemoryError: memory for the engine is not there. What has been done holds,
                and the next call goes on from there.
            EngineError, MemsaverError: what a stage raised, likewise.
        """
        with self._turn("rollout"):
            self.stages = []
            self._enter_rollout()
            self._phase = Phase.ROLLOUT
            with self._block(Stage.GENERATE):
                yield self.engine
            self._phase = Phase.MOVING
            self._sleep()

    @collective_block
    def training(self) -> Iterator[None]:
        """The trainer has the GPU for the block, with its weights and states.

        Raises what `rollout` does.
        """
        with self._turn("training"):
            self._sleep()
            if self._sleeps:
                tags = self._trainer.tags
                self._stage(Stage.RESUME_TRAINER, lambda: self._trainer.resume(*tags))
            self._is_current = False
            self._phase = Phase.TRAINING
            with self._block(Stage.TRAIN):
                yield
                self._trainer.synchronize()

    def close(self) -> None:
        """Take the hooks from the model and the optimizer; the engine is left as it is.

        The tensors stay where they are, in the tags; the session cannot be used any more, and its
        connections with other ranks end. Closing twice is allowed.

        Raises:
            InvalidStateError: inside a block, or some of the trainer's memory is paused: `with
                session.training(): pass` brings it back. Nothing is closed.
        """
        if self._phase is not Phase.IDLE:
            raise InvalidStateError(f"the session cannot be closed in a {self._phase.value}")
        self._trainer.close()
        self._disconnect()

    def _disconnect(self) -> None:
        """End the connections with other ranks, so that torch.distributed can be started again."""
        self._together.close()
        self._fence.close()

    # --- the order --------------------------------------------------------------------------------

    def _enter_rollout(self) -> None:
        trainer = self._trainer
        self._stage(Stage.SETTLE, trainer.synchronize, trainer.empty_cache)
        if self._sleeps:
            self._stage(Stage.PAUSE_OPTIMIZER, lambda: trainer.pause(*trainer.others))
        if not self._is_current:
            if self._sleeps:
                self._stage(Stage.RESUME_MODEL, lambda: trainer.resume(trainer.model))
                self._stage(Stage.WAKE_WEIGHTS, lambda: self._wake(_WEIGHTS))
            self._stage(Stage.UPDATE, self._update, trainer.empty_cache)
            self._is_current = True
        if self._sleeps:
            self._stage(Stage.PAUSE_MODEL, lambda: trainer.pause(trainer.model))
            self._stage(Stage.WAKE_REST, lambda: self._wake(None))

    def _sleep(self) -> None:
        if self._sleeps:
            self._is_current = self._is_current and self._keeps
            self._stage(
                Stage.SLEEP, lambda: self.engine.sleep(wait_idle=True, timeout=self._timeout)
            )

    def _wake(self, tag: str | None) -> Any:
        return self.engine.wake_up(tag, timeout=self._timeout)

    def _update(self) -> Any:
        options = self._options() if callable(self._options) else self._options
        return self.engine.update_weights(self._state(), **options)

    # --- one stage --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """For the block nobody else enters one; the ranks are known to have entered the same."""
        mine = False
        try:
            with interrupts_deferred():
                mine = self._owner.acquire(blocking=False)
            error: MemsaverError | None = None
            # What this rank is about to do follows from what is in these words.
            what = (
                f"{name}() of a session whose engine is {'' if self._is_current else 'not '}current"
            )
            if not mine:
                what = f"{name}() inside another block"
                error = InvalidStateError(
                    f"{name}() inside a {self._phase.value}: leave that block first; nothing has "
                    "changed"
                )
            else:
                try:
                    self._trainer.check()
                except MemsaverError as raised:
                    error = raised
            self._meet(what, None, error, self._block_timeout)
            self._phase = Phase.MOVING
            yield
        finally:
            if mine:
                self._phase = Phase.IDLE
                self._owner.release()

    def _stage(
        self,
        stage: Stage,
        action: Callable[[], Any],
        afterwards: Callable[[], object] | None = None,
    ) -> None:
        """Do it on every rank.

        Args:
            stage: which one.
            action: this rank's part.
            afterwards: what is done when all ranks have done theirs; must not fail.
        """
        started = time.perf_counter()
        result, error = None, None
        with LowWater(self._trainer.device) as water:
            try:
                result = action()
            except BaseException as raised:
                error = raised
            seconds = time.perf_counter() - started
        limit = self._timeout + GRACE_SECONDS
        self._conclude(stage, started, seconds, water, result, error, limit)
        if afterwards is not None:
            afterwards()

    @contextlib.contextmanager
    def _block(self, stage: Stage) -> Iterator[None]:
        """The caller's own stage."""
        started = time.perf_counter()
        error = None
        with LowWater(self._trainer.device) as water:
            try:
                yield
            except BaseException as raised:
                error = raised
            seconds = time.perf_counter() - started
        try:
            self._conclude(stage, started, seconds, water, None, error, self._block_timeout)
        except Exception:  # an interrupt of this rank counts more than its error
            if error is None:
                raise
        if error is not None:
            raise error  # what the caller raised is what the caller gets

    def _conclude(
        self,
        stage: Stage,
        started: float,
        seconds: float,
        water: LowWater,
        result: Any,
        error: BaseException | None,
        timeout: float,
    ) -> None:
        """Hear how the others fared, and tell of it. Raises where one failed."""
        mine = RankStage(self._rank, seconds, water.peak, water.total, _tag_bytes())
        ranks: tuple[RankStage, ...] = ()
        failed = ""
        try:
            ranks = self._meet(f"stage {stage.value}", mine, error, timeout)
        except BaseException as raised:
            failed = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            report = StageReport(stage, time.perf_counter() - started, ranks, result, failed)
            self.stages.append(report)
            if self._on_stage is not None:
                self._on_stage(report)

    def _meet(
        self, what: str, mine: RankStage | None, error: BaseException | None, timeout: float
    ) -> tuple[Any, ...]:
        """What all ranks bring, if none brings an error."""
        try:
            everyones = self._together.gather(what, lambda: (mine, error is not None), timeout)
            if any(failed for _, failed in everyones):
                self._fence.meet(what, error)
        except Exception:
            if error is None or isinstance(error, Exception):
                raise
            raise error from None  # an interrupt, or the process's exit, is for this rank alone
        return tuple(theirs for theirs, _ in everyones)


def _tag_bytes() -> int:
    try:
        return stats().resident_bytes
    except MemsaverError:
        return 0
