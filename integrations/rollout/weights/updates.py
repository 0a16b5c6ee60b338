"""`update`: sends a trainer's weights to an engine."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memsaver.errors import ConfigError, MemsaverError

from ...engine.interface import Broadcast, Layout, SharedTensors, WeightLoad
from ...engine.weights.checks import RankCheck
from ..arguments import check_equal
from ..errors import WeightMismatchError
from ..together import GRACE_SECONDS
from .agreement import check_same, common_tie, names_digest
from .buckets import Bucket, buckets_of
from .colocated import BucketMemory
from .disaggregated import WeightGroup
from .meetings import meetings_of
from .options import Options
from .parts import check_cover
from .report import WeightUpdate
from .sources import Rename, Source, Spec, sources_of
from .verification import Tally, Verify, digests_of, raise_unlike, verification_for, verified_places

if TYPE_CHECKING:
    from ...engine.interface import PauseMode
    from ..engine_set import EngineSet
    from ..rollout_engine import RolloutEngine

__all__ = ["update"]

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
    """Send new weights to an engine. A collective of all ranks of the engine's mesh.

    All ranks pass the same options, except for `state`, `rename` and `timeout`, which may differ if
    they lead to the same tensors.

    The engine's weights must be awake; its KV cache need not be. Without `group` the engine is on
    the same GPUs: each of its ranks shares a GPU with the trainer's rank of the same index in the
    tensor-parallel group, which may have more ranks than the engine.

    Args:
        engine: a `RolloutEngine`; or an `EngineSet`, which needs `group`.
        state: a `torch.nn.Module`, a mapping of names to tensors, or (name, tensor) pairs: whole
            tensors, or DTensors such as FSDP2's, which are gathered a bucket at a time; or `Part`s,
            which each rank writes into the buckets of its group's ranks, on one host. Tensors that
            share the same memory on every rank are sent once, under the first of their names.
        version: the engine's name for the new weights.
        layout: "whole": tensors as in a checkpoint, which the engine's loader splits and fuses.
            "engine": this rank's shards in the engine's layout, under the engine's parameter names,
            as a Megatron-like trainer may have them; they are written unchanged. Not with `group`.
        rename: returns the engine's name for a name in `state`; None leaves the tensor out.
        bucket_bytes: the largest size of a bucket. A larger tensor gets its own bucket.
        verify: "full": all tensors, which reads the engine's weights again. "sampled": one in
            eight tensors, different ones at each update. "off": none. Verified contents must be
            the same on all ranks that send whole tensors, and for all engines. With memsaver's
            plugin in the engine, a tensor from which the model loads nothing is always an error;
            without the plugin nothing can be verified, as `WeightUpdate.unverified` reports.
        group: the group of an engine on other GPUs.
        pause: the mode in which generation is paused during the update (see
            `Backend.pause_generation`). Needed if requests may be in flight. If the update fails,
            generation stays paused.
        flush_cache: whether to flush the prefix cache, which the old weights computed. Default
            True, except with `pause="in_place"`, whose requests continue with the cache.
        timeout: seconds for each of the engine's calls, and to wait for other ranks; None means
            the engine's timeout.
        unknown: must be empty. Unknown arguments are accepted here so that all ranks raise the same
            error.

    Raises:
        WeightMismatchError: the engine's contents differ from those sent, the model has no such
            tensor, or ranks have different contents of a tensor; `tensors` names the tensors.
        ConfigError: the ranks send different tensors or pass different options, or an argument is
            invalid or unknown.
        InvalidStateError: the engine's weights are released, or a tag with memory of `state` is
            paused.
        OutOfDeviceMemoryError: there is no room for the bucket; nothing was sent.
        EngineError, RankError, GroupError: the engine or a rank failed.

    Every error is raised on all ranks, and `state` is unchanged.
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
        self._meetings = meetings_of(engine)
        self._meetings.number += 1
        self._number = self._meetings.number
        self._sources: dict[str, Source] = {}
        self._tied: tuple[str, ...] = ()
        self._tally = Tally()

    def run(self) -> dict[str, Any]:
        """Run the update, and return the report's fields except for the duration."""
        specs = self._agree()
        buckets = buckets_of(
            [(spec.name, spec.nbytes) for spec in specs], self._options.bucket_bytes
        )
        largest = max((bucket.nbytes for bucket in buckets), default=0)
        with contextlib.ExitStack() as held:
            memory: list[BucketMemory] = []

            def room() -> None:
                bucket = BucketMemory(largest, self._device(), self._has_parts)
                memory.append(held.enter_context(bucket))

            timeout = self._options.timeout
            self._meetings.gather(f"{_WHAT}: room for a bucket", room, timeout)
            if self._has_parts:
                self._open(memory[0])
            with self._paused(), self._session():
                for at, bucket in enumerate(buckets):
                    self._send(
                        bucket, memory[0], f"{at + 1} of {len(buckets)}", bucket is buckets[-1]
                    )
            if self._has_parts:  # before the memory is freed, which waits for its users
                self._meetings.gather(f"{_WHAT}: its last step", memory[0].close_others, timeout)
        checksums = self._checksums()
        return {
            "version": self._options.version,
            "bytes": sum(spec.nbytes for spec in specs),
            "tensors": len(specs),
            "tied": self._tied,
            "buckets": len(buckets),
            "bucket_bytes": largest,
            "verify": self._options.verify,
            "checksums": checksums,
            **self._verified(),
        }

    @property
    def _has_parts(self) -> bool:
        """Whether tensors are parts; equal on all ranks after `_agree`."""
        return any(source.part is not None for source in self._sources.values())

    def _open(self, memory: BucketMemory) -> None:
        """Open the buckets of the other ranks of this engine."""
        what, timeout = f"{_WHAT}: the buckets of all ranks", self._options.timeout
        place, count = self._engine.layout.tp_rank, self._engine.layout.tp_size
        rows = self._meetings.gather(what, lambda: memory.shared(count - 1), timeout)
        others = [row[place - (place > rank)] for rank, row in enumerate(rows) if rank != place]
        self._meetings.gather(f"{what}, opened", lambda: memory.open(others), timeout)

    # --- what is sent -----------------------------------------------------------------------------

    def _agree(self) -> list[Spec]:
        """Return the tensors that all ranks send, in order. Changes nothing."""
        # The engine's own timeout, because the update's may be the invalid argument.
        plans = self._meetings.gather(f"{_WHAT}: its plan", self._plan, self._engine.timeout)
        given = [options for options, _ in plans]
        everyones = [specs for _, specs in plans]
        timeout, ranks = self._options.timeout, self._engine.layout.tp_ranks
        what = f"{_WHAT}: its tensors"
        with self._meetings.step(what, timeout):
            check_equal(ranks, given)
            check_same(ranks, everyones, self._options.layout == "whole")
            if not everyones[0]:
                raise ConfigError("there are no tensors to send")
            for same in zip(*everyones, strict=True):
                check_cover(same[0].name, same[0].shape, [spec.box for spec in same])
        # Shards need not have the same size on all ranks.
        specs = [max(same, key=lambda spec: spec.nbytes) for same in zip(*everyones, strict=True)]
        ties = [common_tie(spec.same for spec in same) for same in zip(*everyones, strict=True)]
        ours = ranks, given, names_digest(specs), ties
        engines = self._meetings.along(what, ours, timeout) or [ours]
        check_equal(
            [rank for theirs, *_ in engines for rank in theirs],
            [options for _, theirs, *_ in engines for options in theirs],
        )
        if len({digest for _, _, digest, _ in engines}) > 1:
            raise ConfigError("the ranks of different engines do not send the same tensors")
        ties = [common_tie(each) for each in zip(*(one[3] for one in engines), strict=True)]
        tied = {spec.name for spec, tie in zip(specs, ties, strict=True) if tie}
        self._tied = tuple(spec.name for spec in specs if spec.name in tied)
        return [spec for spec in specs if spec.name not in tied]

    def _plan(self) -> tuple[dict[str, str], list[Spec]]:
        """Check the arguments; return those that all ranks compare, and this rank's tensors."""
        self._engine._check_call(self._options.timeout)
        self._options.check(self._engine)
        if self._engine.layout.is_leader:
            self._engine._engine.control.check("update_weights")
        sources = sources_of(self._state, rename=self._options.rename)
        for source in sources:
            source.check()
            if source.distributed and self._options.layout == "engine":
                raise ConfigError(
                    f"{source.spec.name} is a DTensor, which is sent whole: in the engine's layout "
                    "pass this rank's shard (`to_local()`)"
                )
            if source.part is not None and self._options.layout == "engine":
                raise ConfigError(f"{source.spec.name} is a `Part`: pass layout='whole'")
        self._sources = {source.spec.name: source for source in sources}
        return self._options.compared(), [source.spec for source in sources]

    def _device(self) -> Any:
        """Return the device for buckets: the state's device, or the group's."""
        import torch

        devices = {source.device for source in self._sources.values()}
        on_gpu = [device for device in devices if device.type == "cuda"]
        wanted = self._options.group.device if self._options.group is not None else None
        if wanted == "cpu" or (wanted is None and not on_gpu and not torch.cuda.is_available()):
            return torch.device("cpu")
        return on_gpu[0] if on_gpu else torch.device("cuda", torch.cuda.current_device())

    # --- the engine -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Pause generation for the block, if requested; after an error it stays paused."""
        mode, timeout = self._options.pause, self._options.timeout
        if mode is None:
            yield
            return
        backend = self._engine.backend

        def begin() -> None:
            assert backend is not None and mode is not None
            backend.pause_generation(mode, timeout)

        def end() -> None:
            assert backend is not None
            backend.continue_generation(timeout)

        self._meetings.on_leader("pausing generation", begin, timeout)
        try:
            yield
        except MemsaverError as error:
            error.message += (
                "; generation is still paused: repeat the update, or call continue_generation()"
            )
            raise
        self._meetings.on_leader("continuing generation", end, timeout)

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        """Keep the engine's weights in the layout for loading during the block."""
        backend, timeout = self._engine.backend, self._options.timeout

        def begin() -> None:
            assert backend is not None
            backend.begin_update(timeout)

        def end(limit: float = timeout) -> None:
            assert backend is not None
            backend.end_update(limit)

        try:
            # A begin that failed may still have taken effect: after its timeout, or on other
            # engines.
            self._meetings.on_leader(f"{_WHAT}: its beginning", begin, timeout)
            yield
        except BaseException:
            if backend is not None:  # so that a new update is possible; other ranks do not wait
                with contextlib.suppress(MemsaverError):
                    end(min(timeout, GRACE_SECONDS))
            raise
        self._meetings.on_leader(f"{_WHAT}: its end", end, timeout)

    def _send(self, bucket: Bucket, memory: BucketMemory, which: str, last: bool) -> None:
        """Send one bucket from the trainer's memory into the engine's."""
        what = f"{_WHAT}: bucket {which}"
        places = verified_places(bucket, self._options.verify, self._number)
        # The first step does not wait for the device: the wait would not end without all ranks.
        views: list[tuple[str, int, Any]] = []
        self._meetings.gather(
            f"{what}, gathered",
            lambda: views.extend(memory.write(bucket, self._sources)),
            self._options.timeout,
        )
        if self._has_parts:  # which other ranks wrote into this rank's memory
            self._meetings.gather(f"{what}, written", memory.settle, self._options.timeout)

        def payload() -> tuple[str, tuple[str, ...]]:
            memory.settle()
            if self._options.group is not None:  # only the leader's tensors are sent
                return "", digests_of(views, places) if self._engine.layout.is_leader else ()
            digests = digests_of(views, places)
            if self._engine.layout.tp_rank >= self._engine.tp_size:
                return "", digests  # torch keeps memory until each receiver has closed it
            return memory.payload(views, self._options.layout), digests

        timeout, engines = self._options.timeout, self._engine.layout
        with self._meetings.step(what, timeout) as own:
            rows = own.gather(what, payload, timeout)
            sent = [digests for _, digests in rows]
            if self._options.group is not None:
                sent = sent[:1]
            elif self._options.layout == "whole":
                raise_unlike(bucket, places, sent, [f"rank {rank}" for rank in engines.tp_ranks])
        each = self._meetings.along(what, (engines.dp_rank, sent), timeout)
        flat = [tuple(itertools.chain(*theirs)) for _, theirs in each]
        raise_unlike(bucket, places * len(sent), flat, [f"engine {at}" for at, _ in each])
        memory.sending()
        with self._meetings.step(what, timeout) as own:
            checks = own.on_leader(
                what,
                lambda: self._load(bucket, views, places, [text for text, _ in rows], sent, last),
                timeout,
            )
            self._tally.add(bucket, places, checks)

    def _load(
        self,
        bucket: Bucket,
        views: Views,
        places: Sequence[int],
        payloads: Sequence[str],
        sent: Sequence[tuple[str, ...]],
        last: bool,
    ) -> list[RankCheck]:
        """Make the engine load a bucket. Call it only on the leader."""
        backend, options = self._engine.backend, self._options
        assert backend is not None
        tensors = [view for _, _, view in views]
        source: SharedTensors | Broadcast
        if options.group is None:
            # The engine may have fewer ranks than the trainer.
            payloads, sent = payloads[: backend.tp_size], sent[: backend.tp_size]
            source = SharedTensors(tuple(payloads), options.layout)
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
        """Return the checksums of an engine without the plugin, which must be equal on all engines.

        They are computed in the model's own layout, so the sender cannot compute them.
        """
        if self._tally.ranks or self._options.verify == "off":
            return ()
        backend, timeout = self._engine.backend, self._options.timeout
        what = f"{_WHAT}: the engine's checksums"

        def query() -> tuple[str, ...]:
            assert backend is not None
            return tuple(backend.checksums(timeout))

        with self._meetings.step(what, timeout) as own:
            checksums = own.on_leader(what, query, timeout)
        if len(set(self._meetings.along(what, checksums, timeout))) > 1:
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
