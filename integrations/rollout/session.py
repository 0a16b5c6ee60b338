"""`ColocatedSession`: a trainer and an engine that alternate on the same GPUs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from memsaver._runtime.interrupts import collective_block, signals_deferred
from memsaver._runtime.native import Backup
from memsaver._runtime.timeouts import check_timeout
from memsaver.distributed.words import listed
from memsaver.errors import InvalidStateError, MemsaverError

from ..engine.errors import EngineDiedError
from .fence import Fence
from .overlap import Overlap
from .rollout_engine import RolloutEngine
from .session_arguments import check_agreed, check_options, group_of, layout_beside
from .stage_order import StageOrder
from .stages import Stage, StageReport
from .together import Together
from .trainer_memory import TrainerMemory
from .weights.sources import state_of

__all__ = ["ColocatedSession", "Phase"]


class Phase(str, Enum):
    """The state of a session. The values are the names in lower case."""

    IDLE = "idle"  # between blocks, including after an error
    MOVING = "moving"  # memory moves between the trainer and the engine
    ROLLOUT = "rollout"  # in `with session.rollout()`
    TRAINING = "training"  # in `with session.training()`


class ColocatedSession(StageOrder):
    """Runs the steps of a trainer and an engine that alternately use the same GPU memory.

        session = ColocatedSession(engine, model, optimizer)
        for step in range(steps):
            with session.rollout() as engine:  # the engine has the trainer's weights, and the GPU
                output = engine.generate(prompts, sampling)
            with session.training():  # the trainer has its weights, its states, and the GPU
                train(output)

    Between the blocks, the session runs the stages of `Stage` in order. Before a rollout, the
    session waits until the trainer's work is finished on all ranks, empties torch's cache, pauses
    the optimizer, wakes the engine's weights, updates them from the trainer's weights, pauses the
    trainer's weights, and wakes the KV cache and the graphs. At the end of the rollout's block, the
    engine goes to sleep. Before a training block, the session resumes the trainer's memory.
    Unnecessary stages are skipped. For example, the session does not resend weights that the engine
    already has.

    **Overlap.** With `overlap=True`, the optimizer's states are resumed while the block of
    `training()` computes gradients. The optimizer's `step`, `state_dict` and `load_state_dict` wait
    for the states (see `Offloaded.resume`). The states are resumed before the block if their tag
    also contains parameters or gradients that were paused, or if too little memory is free for the
    whole trainer. The states are paused while weights are being sent if an earlier update in the
    session showed that there is enough memory for both. If the model is an `Offloaded` from
    `offload(by_layer=True)`, the model is also resumed during the block, before the states, and
    each module's forward pass waits for the module's parameters. A tag is resumed during the block
    on all ranks or on none.

    **Ranks.** With several ranks, the constructor and all calls are collective calls of `group`,
    and every rank must enter and leave the same blocks. An invalid argument on one rank raises an
    error on all ranks immediately. Each stage ends at the same time on all ranks. If a stage fails
    on a rank, every rank raises an error of the same class (a `RankError` if ranks fail
    differently), whose message names the ranks and the reasons. If an exception leaves a block on
    some ranks, these ranks raise that exception, and all other ranks raise such an error at the end
    of the block. An interrupt (Ctrl-C) counts as a failure, even between two stages, and is raised
    again on the interrupted rank.

    **Errors.** A failure loses none of the trainer's data. A failed stage ends the call, and the
    session becomes idle. Entering either block again runs the remaining stages. After a failed
    pause, the trainer's memory is mapped. After a failed resume, the trainer's memory is paused and
    its backup is intact. The engine's own error describes the engine's state. After a failed
    update, the trainer's weights are intact, but the engine's weights are undefined, and no block
    can use the engine until the next rollout has updated its weights. If the pause that ran
    alongside the update also failed, its error is added to the update's error as a note. After an
    exception in a rollout's block, the engine stays awake until the next block. A call in the wrong
    order raises `InvalidStateError` and changes nothing.

    During a training block, each rank resumes memory independently. If such a resume fails on a
    rank, this rank raises the error at the beginning of the block, in a forward pass, in the
    optimizer's step, or at the end of the block. The other ranks raise the error at the beginning
    or at the end of the block. The session then pauses the tag again on all ranks, with its current
    contents. A step that has already run on another rank is not undone.

    Gradients that exist when a rollout begins are backed up with the optimizer's states, which
    costs time and host memory. To avoid this cost, call `optimizer.zero_grad()` at the end of each
    step. Only one thread at a time may use the session. Change the weights only inside
    `training()`, or call `weights_changed()` after a change.

    Attributes:
        engine: the engine.
        stages: the reports of the latest rollout and of later stages, including failed ones.

    Args:
        engine: a `RolloutEngine`, or an object with the same `sleep`, `wake_up` and
            `update_weights` methods. The engine can be awake or asleep.
        model: the trainer's model, whose parameters and buffers are moved to the tag "model"; or
            the model's `Offloaded`.
        optimizer: the model's optimizer, or several optimizers, whose states and gradients are
            moved to the tag "optimizer"; or the `Offloaded` of these optimizers. None if no
            optimizer is on the GPU.
        state: a function that returns the weights for `RolloutEngine.update_weights`. If None, the
            tensors of `model.state_dict()` are sent.
        tags: further tags of the trainer, such as the tag of a reference model, which are paused
            and resumed with the optimizer. The tags must be the same on all ranks, and each tag
            must exist and have a backup.
        group: a `torch.distributed` group of all ranks of the trainer. None means the world group,
            or only this process if torch.distributed is not initialized.
        backup: the backup method for the trainer's memory; see `offload`. "none" is invalid,
            because the contents are needed.
        sleep: whether the engine sleeps and the trainer's memory is paused. False skips only these
            steps, for comparison runs.
        overlap: whether other stages run while the optimizer's memory is paused and resumed, and
            while the memory of a model with `by_layer` is resumed. The value must be False if the
            block of `training()` uses the states, or other memory in their tag, before the first
            step. The value must also be False if the block uses gradients in the tag of a model
            with `by_layer` before the model's forward pass has ended.
        engine_keeps_weights: whether the engine keeps its weights during a sleep, as with SGLang's
            `enable_weights_cpu_backup`. If True, weights are sent only after a `training` block.
        whole_updates: whether each update rewrites all of the engine's weights. If True, the engine
            does not save its weights for a sleep that must be followed by an update, and does not
            restore its weights before an update, even if it could save and restore them.
        update_options: the options of `RolloutEngine.update_weights`, or a function that returns
            the options for each update, such as the new version of the weights.
        timeout: the time limit for a stage on each rank, in seconds. Ranks wait for each other
            slightly longer, so that a failure just before the time limit is still reported to all
            ranks.
        block_timeout: seconds to wait for the other ranks at the beginning and the end of a block.
        on_stage: a function that is called with the report of each stage, including failed stages.
            The function must not raise.

    Raises:
        ConfigError: the model or an optimizer cannot be offloaded, a tag has no backup, an option
            is invalid, or `group` is not a process group. Also raised if the ranks pass different
            values of `sleep`, `overlap`, `engine_keeps_weights`, `whole_updates` or `tags`. Raised
            on all ranks.
        UnknownTagError: one of `tags` was never used in a region.
        InvalidStateError: a handle or the group is closed, or this rank is not in `group`. In the
            latter case, only this rank raises the error, and the group's ranks wait for each other
            until `timeout`.
        GroupError: not all ranks created the session within `timeout`, or the ranks used different
            groups.
        MemsaverError: see `offload` and `memsaver.distributed`; raised on all ranks.
    """

    @signals_deferred()  # no handler may run between the collectives
    def __init__(
        self,
        engine: RolloutEngine,
        model: Any,
        optimizer: Any = None,
        *,
        state: Callable[[], Any] | None = None,
        tags: Sequence[str] = (),
        group: Any = None,
        backup: Backup | None = None,
        sleep: bool = True,
        overlap: bool = False,
        engine_keeps_weights: bool = False,
        whole_updates: bool = False,
        update_options: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        timeout: float = 600.0,
        block_timeout: float = 1800.0,
        on_stage: Callable[[StageReport], object] | None = None,
    ) -> None:
        # Arguments are checked only when a failure can be reported to all ranks.
        everyone = group_of(group)
        self._together = Together(everyone, timeout, "session")

        with contextlib.ExitStack() as undo:
            undo.callback(self._together.close)

            def begin() -> dict[str, str]:
                self._sleeps = bool(sleep)
                self._keeps = bool(engine_keeps_weights) or not self._sleeps
                self._rewrites = bool(whole_updates)
                check_options(state, model, engine, on_stage, update_options, self._sleeps)
                check_timeout(block_timeout, "block_timeout")
                self._trainer = TrainerMemory(
                    model,
                    optimizer,
                    group=everyone,
                    tags=tags,
                    backup=backup,
                    timeout=timeout,
                    offloading=self._sleeps,
                )
                undo.callback(self._trainer.undo)  # runs only if another rank fails
                return {
                    "sleep": str(self._sleeps),
                    "overlap": str(bool(overlap)),
                    "engine_keeps_weights": str(bool(engine_keeps_weights)),
                    "whole_updates": str(self._rewrites),
                    "tags": f"({listed(tags)})",
                }

            given = self._together.gather("the beginning of a session", begin, timeout)
            check_agreed(everyone, given)
            layout = layout_beside(everyone)
            self._fence = Fence(layout, timeout, names_engines=False)
            undo.pop_all()
        self._overlap = Overlap(self._trainer, bool(overlap) and self._sleeps)
        self.engine = engine
        self.stages: list[StageReport] = []
        self._state = state if state is not None else functools.partial(state_of, model)
        self._options = update_options if update_options is not None else {}
        self._timeout = timeout
        self._block_timeout = block_timeout
        self._on_stage = on_stage
        self._phase = Phase.IDLE
        self._owner = threading.Lock()  # locked inside a block
        self._is_current = False  # whether the engine has the trainer's weights
        self._rank = layout.rank

    def __repr__(self) -> str:
        return f"<memsaver ColocatedSession: {self._phase.value}>"

    @property
    def phase(self) -> Phase:
        """The session's state."""
        return self._phase

    @property
    def trainer_tags(self) -> tuple[str, ...]:
        """The trainer's tags, with the model's tag first; an empty tuple without `sleep`."""
        return self._trainer.tags

    @property
    def engine_is_current(self) -> bool:
        """Whether the engine has the trainer's current weights, as far as the session knows."""
        return self._is_current

    @signals_deferred()  # no handler may run between the collectives
    def send_weights(self) -> None:
        """Send the trainer's weights again to an engine that has lost them. A collective.

        Intended for `Restarts.send`. The engine sleeps while the trainer's model is resumed. A call
        between blocks sends nothing immediately; the next rollout sends the weights.

        Raises: see `rollout`; `InvalidStateError` in `training()`, or if the session is closed.
        """
        if self._phase is Phase.IDLE:
            self._trainer.check()
            self._is_current = False
            return
        if self._phase is not Phase.ROLLOUT:
            raise InvalidStateError(
                f"weights are sent again in a rollout, not in {self._phase.value}"
            )
        self._is_current = False
        self._sleep(keep_weights=not self._rewrites)
        self._enter_rollout()

    def weights_changed(self) -> None:
        """Record that the trainer's weights changed outside `training()`. Call on all ranks."""
        self._is_current = False

    @collective_block
    def rollout(self) -> Iterator[RolloutEngine]:
        """Let the engine use the GPU with the trainer's weights during the block; yield the engine.

        Raises:
            InvalidStateError: another block of this session is open, or the session or one of its
                handles is closed.
            ConfigError: a tag of the trainer has lost its backup; nothing is paused.
            RankError: the block or a stage failed on some ranks, or the ranks made different calls.
            GroupError: a rank died, hung, or was late. Restart the job after this error.
            OutOfDeviceMemoryError: too little memory is free for the engine. The effects of earlier
                stages remain, and the next call continues with the failed stage.
            EngineError, MemsaverError: a stage failed; the next call continues with the failed
                stage.
        """
        with self._exclusive("rollout"):
            self.stages = []
            self._enter_rollout()
            self._phase = Phase.ROLLOUT
            with self._block(Stage.GENERATE):
                yield self.engine
            self._phase = Phase.MOVING
            self._sleep(keep_weights=self._keeps or not self._rewrites)

    @collective_block
    def training(self) -> Iterator[None]:
        """Let the trainer use the GPU with its weights and states during the block.

        Raises: see `rollout`. If the engine has died, the block still runs, and the next rollout
        raises `EngineDiedError`.
        """
        with self._exclusive("training"):
            try:
                self._sleep(keep_weights=not self._rewrites)
            except EngineDiedError:
                if not self._all_know_failure:
                    raise
            returning: tuple[str, ...] = ()
            if self._sleeps:
                returning = self._common("the resume's overlap", self._overlap.returning)
            with self._undoing_resume(returning):
                if self._sleeps:
                    self._stage(Stage.RESUME_TRAINER, lambda: self._overlap.resume(returning))
                self._is_current = False
                self._phase = Phase.TRAINING
                with self._block(Stage.TRAIN) as results:
                    yield
                    results.append(self._overlap.finish_resume())
                    self._trainer.synchronize()

    def close(self) -> None:
        """Remove the hooks from the model and the optimizer; the engine is unchanged.

        The tensors stay in the tags, at the same addresses. The session's connections to other
        ranks are closed, and the session cannot be used afterwards. It is safe to call `close`
        twice.

        Raises:
            InvalidStateError: a block of the session is open, or some of the trainer's memory is
                paused. To resume the memory, run `with session.training(): pass`, or
                `memsaver.resume(*session.trainer_tags)` if the engine is closed. Nothing is closed.
        """
        if self._phase is not Phase.IDLE:
            raise InvalidStateError(f"the session cannot be closed in a {self._phase.value}")
        self._trainer.close()
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the connections to other ranks, so that torch.distributed can be restarted."""
        self._together.close()
        self._fence.close()

    # --- a block ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """Ensure that all ranks enter the same block, and that no other thread enters a block.

        Use this context manager only in a `collective_block`, which defers signals.
        """
        mine = False
        try:
            mine = self._owner.acquire(blocking=False)
            error: MemsaverError | None = None
            # Ranks with the same description run the same stages.
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
            self._exchange(what, None, error, self._block_timeout)
            self._phase = Phase.MOVING
            yield
        finally:
            if mine:
                self._overlap.settle()
                self._phase = Phase.IDLE
                self._owner.release()
