"""`update`, which sends a trainer's weights to an engine."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError

from ...engine.interface import Broadcast, Layout, SharedTensors, WeightLoad
from ...engine.weights.checks import RankCheck
from ..errors import WeightMismatchError
from ..together import GRACE_SECONDS
from .buckets import Bucket
from .colocated import BucketMemory
from .disaggregated import WeightGroup
from .options import Options
from .pauses import paused_generation
from .plan import agree
from .regions import RegionTensors
from .report import WeightUpdate
from .sources import Rename
from .update_steps import UpdateSteps
from .verification import Tally, Verify, digests_of, raise_unlike, verification_for, verified_places

if TYPE_CHECKING:
    from ...engine.interface import PauseMode
    from ..engine_set import EngineSet
    from ..rollout_engine import RolloutEngine

__all__ = ["update"]

PayloadMemory: TypeAlias = BucketMemory | RegionTensors
"""A rank's memory with the tensors of one load at a time."""

Views = Sequence[tuple[str, int, Any]]

_WHAT = "an update of the engine's weights"


def update(
    engine: RolloutEngine | EngineSet,
    /,
    state: Any,
    *,
    version: str | None = None,
    layout: Layout = "whole",
    rename: Rename | None = None,
    bucket_bytes: int = 512 << 20,
    verify: Verify = "sampled",
    group: WeightGroup | None = None,
    pause: PauseMode | None = None,
    flush_cache: bool | None = None,
    timeout: float | None = None,
    **unknown: object,
) -> WeightUpdate:
    """Send new weights to an engine. This is a collective call of all ranks of the engine's mesh.

    All ranks must pass the same options, except for `state`, `rename` and `timeout`, which can
    differ as long as the resulting tensors are the same.

    The engine's weights must be awake, but its KV cache can be asleep. Without `group`, the engine
    must be on the trainer's GPUs. Each of the engine's ranks shares a GPU with the trainer rank
    that has the same index in the tensor-parallel group; the group can have more ranks than the
    engine.

    Tensors in shareable regions are sent without a bucket if the engine can map them
    (`WeightUpdate.mapped`). The caller must not change these tensors during the call.

    Args:
        engine: a `RolloutEngine`, or an `EngineSet`, which requires `group`.
        state: a `torch.nn.Module`, a mapping of names to tensors, or (name, tensor) pairs. The
            tensors can be whole tensors, DTensors such as those of FSDP2, or `Part`s. DTensors are
            gathered one bucket at a time. Each rank writes its `Part`s to the buckets of its
            group's ranks, all of which must be on one host. Tensors that share the same memory on
            every rank are sent once, under the first of their names.
        version: the engine's name for the new weights.
        layout: "whole": tensors as in a checkpoint, which the engine's loader splits and fuses.
            "engine": this rank's shards in the engine's layout, under the engine's parameter names,
            for example from a trainer like Megatron. These shards are written unchanged. "engine"
            cannot be combined with `group`.
        rename: a function that returns the engine's name for a name in `state`, or None to omit the
            tensor.
        bucket_bytes: the maximum size of a bucket. A larger tensor gets its own bucket.
        verify: the tensors to verify. "full": all tensors, which requires reading the engine's
            weights again. "sampled": one in eight tensors; each update samples different tensors.
            "off": none. Verified contents must be the same on all ranks that send whole tensors,
            and in all engines. If the engine has memsaver's plugin, a tensor from which the model
            loads nothing is always an error. Without the plugin, nothing can be verified, and
            `WeightUpdate.unverified` reports the reason.
        group: the group of an engine on other GPUs.
        pause: the mode in which generation is paused during the update (see
            `Backend.pause_generation`). A mode is required if requests can be in flight. If the
            update fails, generation stays paused. If the pause fails on an engine, generation
            continues on all engines, even if generation was already paused earlier.
        flush_cache: whether to flush the prefix cache, which was computed with the old weights. The
            default is True, except with `pause="in_place"`, because the paused requests continue
            with their cache.
        timeout: the time limit in seconds for each of the engine's calls, and for another thread's
            transition of a tag with memory of `state`; None means the engine's timeout. This rank
            reports other ranks as missing if they take 30 seconds longer than this rank's own
            waits. All tensors that are sent without a bucket, usually the whole model, are sent in
            one call. The same limit, capped at the engine's own timeout, applies to the total time
            that a `state_dict` waits for background resumes.
        unknown: must be empty. Unknown arguments are accepted here because all ranks must raise the
            same error for them.

    Raises:
        WeightMismatchError: the engine's contents differ from those that were sent, the model lacks
            a tensor that was sent, or a tensor's contents differ between ranks. The error's
            attribute `tensors` contains the names of the tensors.
        ConfigError: the ranks send different tensors or pass different options, or an argument is
            invalid or unknown.
        InvalidStateError: the engine's weights are released, a tag that contains memory of `state`
            is paused, or another thread's transition of such a tag did not end within `timeout`. In
            the last case, nothing was sent. Another thread's pause of such a tag waits until the
            update has finished.
        OutOfDeviceMemoryError: too little memory is free for the bucket; nothing was sent.
        SharingError: the engine cannot map a tensor of a shareable region, the engine's loader
            would write to the tensor, or this thread paused the tensor's tag during the update.
        EngineError, RankError, GroupError: the engine failed or a rank failed.

    Every error is raised on all ranks. `state` is unchanged after an error.
    """
    limit = engine.timeout if timeout is None else timeout
    started = time.monotonic()
    given = (version, layout, rename, bucket_bytes, verify, group, pause, flush_cache, limit)
    options = Options(*given, tuple(unknown))
    report = _Update(engine, state, options).run()
    return WeightUpdate(seconds=time.monotonic() - started, **report)


class _Update:
    """One update on one rank."""

    def __init__(self, engine: RolloutEngine | EngineSet, state: Any, options: Options) -> None:
        self._engine = engine
        self._state = state
        self._options = options
        self._steps = UpdateSteps(engine)
        engine._updates += 1
        self._number = engine._updates
        self._tally = Tally()

    def run(self) -> dict[str, Any]:
        """Run the update, and return all fields of the report except the duration."""
        self._plan = agree(self._engine, self._state, self._options, self._steps, _WHAT)
        plan, timeout = self._plan, self._options.timeout
        largest = max((bucket.nbytes for bucket in plan.buckets), default=0)
        with contextlib.ExitStack() as held:
            memory: list[BucketMemory] = []

            def begin() -> None:
                # Until the update ends, no other thread can pause the tags.
                held.enter_context(_C.Reservation(plan.tags, timeout))
                for source in plan.sources.values():
                    source.check()
                if plan.buckets:
                    bucket = BucketMemory(largest, plan.device, plan.has_parts)
                    memory.append(held.enter_context(bucket))

            # A rank that waits for a tag until its timeout still reports to the others.
            self._steps.gather(f"{_WHAT}: its memory", begin, timeout + GRACE_SECONDS)
            if plan.has_parts:
                self._open(memory[0])
            loads: list[tuple[str, Bucket, PayloadMemory]] = [
                (f"bucket {at} of {len(plan.buckets)}", bucket, memory[0])
                for at, bucket in enumerate(plan.buckets, 1)
            ]
            if plan.mapped is not None:
                tensors = held.enter_context(RegionTensors(plan.device))
                loads.insert(0, ("tensors in regions", plan.mapped, tensors))
            with (
                paused_generation(self._engine, self._steps, self._options),
                self._session(),
            ):
                for load in loads:
                    self._send(*load, load is loads[-1])
            if plan.has_parts:  # deleted first, because freeing the memory waits for its users
                self._steps.gather(f"{_WHAT}: its last step", memory[0].close_others, timeout)
        checksums = self._checksums()
        return {
            "version": self._options.version,
            "bytes": sum(spec.nbytes for spec in plan.specs),
            "tensors": len(plan.specs),
            "tied": plan.tied,
            "mapped": len(plan.mapped.slots) if plan.mapped is not None else 0,
            "buckets": len(plan.buckets),
            "bucket_bytes": largest,
            "verify": self._options.verify,
            "checksums": checksums,
            **self._verified(),
        }

    def _open(self, memory: BucketMemory) -> None:
        """Open the buckets of the other ranks of this engine."""
        what, timeout = f"{_WHAT}: the buckets of all ranks", self._options.timeout
        place, count = self._engine.layout.tp_rank, self._engine.layout.tp_size
        rows = self._steps.gather(what, lambda: memory.shared(count - 1), timeout)
        others = [row[place - (place > rank)] for rank, row in enumerate(rows) if rank != place]
        self._steps.gather(f"{what}, opened", lambda: memory.open(others), timeout)

    # --- the engine -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Keep the engine's weights in the loading format during the block."""
        backend, timeout = self._engine.backend, self._options.timeout

        def begin() -> None:
            assert backend is not None
            backend.begin_update(timeout)

        def end(limit: float = timeout, complete: bool = True) -> None:
            assert backend is not None
            backend.end_update(limit, complete)

        try:
            # A failed `begin` may still have taken effect: after its timeout, or on other engines.
            self._steps.on_leader(f"{_WHAT}: its beginning", begin, timeout)
            yield
        except BaseException:
            if backend is not None:  # allows a new update; other ranks do not wait here
                with contextlib.suppress(MemsaverError):
                    end(min(timeout, GRACE_SECONDS), complete=False)
            raise
        self._steps.on_leader(f"{_WHAT}: its end", end, timeout)

    def _send(self, which: str, bucket: Bucket, memory: PayloadMemory, last: bool) -> None:
        """Send the tensors of one load from the trainer's memory to the engine's memory."""
        what = f"{_WHAT}: {which}"
        places = verified_places(bucket, self._options.verify, self._number)
        # The first step does not wait for the device, because the wait would not end without all
        # ranks.
        views: list[tuple[str, int, Any]] = []

        def gather() -> None:
            for name in bucket.names:  # this thread may have paused a tag
                self._plan.sources[name].check()
            views.extend(memory.write(bucket, self._plan.sources))

        self._steps.gather(f"{what}, gathered", gather, self._options.timeout)
        if self._plan.has_parts:  # other ranks wrote into this rank's memory
            self._steps.gather(f"{what}, written", memory.settle, self._options.timeout)

        def payload() -> tuple[str, tuple[str, ...]]:
            memory.settle()
            if self._options.group is not None:  # only the leader's tensors are sent
                return "", digests_of(views, places) if self._engine.layout.is_leader else ()
            text = ""  # without a receiver: torch keeps memory until its receiver closes it
            if self._engine.layout.tp_rank < self._engine.tp_size:
                # First, because it raises an error if the memory is paused.
                text = memory.payload(views, self._options.layout)
            return text, digests_of(views, places)

        timeout, engines = self._options.timeout, self._engine.layout
        with self._steps.step(what, timeout) as own:
            rows = own.gather(what, payload, timeout)
            sent = [digests for _, digests in rows]
            if self._options.group is not None:
                sent = sent[:1]
            elif self._options.layout == "whole":
                raise_unlike(bucket, places, sent, [f"rank {rank}" for rank in engines.tp_ranks])
        each = self._steps.along(what, (engines.dp_rank, sent), timeout)
        flat = [tuple(itertools.chain(*theirs)) for _, theirs in each]
        raise_unlike(bucket, places * len(sent), flat, [f"engine {at}" for at, _ in each])
        memory.sending()
        with self._steps.step(what, timeout) as own:
            checks = own.on_leader(
                what,
                lambda: self._load(
                    bucket, memory, views, places, [text for text, _ in rows], sent, last
                ),
                timeout,
            )
            self._tally.add(bucket, places, checks)

    def _load(
        self,
        bucket: Bucket,
        memory: PayloadMemory,
        views: Views,
        places: Sequence[int],
        payloads: Sequence[str],
        sent: Sequence[tuple[str, ...]],
        last: bool,
    ) -> list[RankCheck]:
        """Make the engine load a bucket. Call this method only on the leader."""
        backend, options = self._engine.backend, self._options
        assert backend is not None
        tensors = [view for _, _, view in views]
        source: SharedTensors | Broadcast
        if options.group is None:
            # The engine may have fewer ranks than the trainer.
            payloads, sent = payloads[: backend.tp_size], sent[: backend.tp_size]
            in_bucket = isinstance(memory, BucketMemory)
            source = SharedTensors(tuple(payloads), options.layout, in_bucket)
        else:
            dtypes = (str(tensor.dtype).removeprefix("torch.") for tensor in tensors)
            shapes = (tuple(tensor.shape) for tensor in tensors)
            source = Broadcast(options.group.name, bucket.names, tuple(dtypes), tuple(shapes))
        load = WeightLoad(
            source,
            options.timeout,
            flush_cache=last and options.flushes,
            weight_version=options.version if last else None,
            verification=verification_for(bucket, places, sent),
        )
        if options.group is None:
            return backend.load_weights(load)
        return options.group.broadcast(tensors, lambda: backend.load_weights(load), options.timeout)

    def _checksums(self) -> tuple[str, ...]:
        """Return the checksums of an engine without the plugin; raise an error if checksums differ.

        The engine computes the checksums because they depend on the model's own layout, which the
        sender does not know. If any engine of the mesh lacks the plugin, the ranks of all engines
        take part in the collective calls.
        """
        if self._options.verify == "off":
            return ()
        backend, timeout = self._engine.backend, self._options.timeout
        what = f"{_WHAT}: the engine's checksums"
        has_compared = self._tally.ranks > 0
        if all(self._steps.along(what, has_compared, timeout)):
            return ()

        def query() -> tuple[str, ...]:
            assert backend is not None
            return () if has_compared else tuple(backend.checksums(timeout))

        with self._steps.step(what, timeout) as own:
            checksums = own.on_leader(what, query, timeout)
        each = self._steps.along(what, (has_compared, checksums), timeout)
        if len({theirs for compared, theirs in each if not compared}) > 1:
            raise WeightMismatchError(
                f"engines that received the same weights have different checksums: {checksums} on "
                f"rank {self._engine.layout.leader}, others elsewhere; update them again"
            )
        return checksums

    def _verified(self) -> Mapping[str, Any]:
        tally = self._tally
        lacks = "the engine lacks memsaver's plugin, so it cannot compare its weights"
        why = "; ".join(tally.reasons) if tally.ranks else lacks
        return {
            "received": tally.received,
            "held": tally.held,
            "unverified": why if self._options.verify != "off" else "",
        }
