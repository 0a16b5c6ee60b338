"""`Plan`: the tensors that the ranks of an update agree to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memsaver._memory.sharing.wire import domain
from memsaver.errors import ConfigError

from ...trainer.arrivals import limited_waits
from ..arguments import check_equal
from ..together import GRACE_SECONDS
from .agreement import check_same, common_tie, names_digest
from .buckets import Bucket, Slot, buckets_of
from .options import Options
from .parts import check_cover
from .sources import Source, Spec, sources_of
from .update_steps import UpdateSteps

if TYPE_CHECKING:
    from ..engine_set import EngineSet
    from ..rollout_engine import RolloutEngine

__all__ = ["Plan", "agree"]


@dataclass(frozen=True)
class Plan:
    """The tensors of an update; the same on all ranks, except for `sources` and `device`.

    Attributes:
        sources: this rank's tensors, by name.
        device: the device of this rank's buckets.
        specs: the descriptions of the tensors to send, in order.
        tied: the tensors that are not sent because they share the memory of another tensor.
        mapped: the bucket of the tensors that the engine maps, which are sent in one load; None if
            the engine maps no tensor.
        buckets: the buckets with all other tensors.
    """

    sources: Mapping[str, Source]
    device: Any
    specs: Sequence[Spec]
    tied: tuple[str, ...]
    mapped: Bucket | None
    buckets: Sequence[Bucket]

    @property
    def tags(self) -> list[str]:
        """The tags that contain memory of this rank's tensors."""
        return list(dict.fromkeys(tag for one in self.sources.values() for tag in one.tags))

    @property
    def has_parts(self) -> bool:
        """Whether a bucket contains a part."""
        names = (name for bucket in self.buckets for name in bucket.names)
        return any(self.sources[name].part is not None for name in names)


def agree(
    engine: RolloutEngine | EngineSet, state: Any, options: Options, steps: UpdateSteps, what: str
) -> Plan:
    """Return the plan of an update. This is a collective call that changes nothing.

    Args:
        engine: see `update`.
        state: see `update`.
        options: the update's arguments.
        steps: the collective calls of the update.
        what: a description of the update.

    Raises:
        ConfigError, InvalidStateError, EngineError: see `update`; raised on all ranks.
    """
    sources: dict[str, Source] = {}
    devices: list[Any] = []

    def offer() -> tuple[dict[str, str], list[Spec], frozenset[str], str]:
        """Check the arguments; return this rank's values for comparison across all ranks."""
        sources.update(_checked_sources(engine, state, options))
        devices.append(_device(sources.values(), options))
        specs = [source.spec for source in sources.values()]
        mappable = _mappable(engine, options, sources, devices[0])
        return options.compared(), specs, mappable, domain()

    # The engine's own timeout, because the update's may be the invalid argument. A rank whose
    # `state_dict` waits until the timeout still reports to the others.
    limit = engine.timeout + GRACE_SECONDS
    offers = steps.gather(f"{what}: its plan", offer, limit)
    given, everyones, mappable, domains = zip(*offers, strict=True)
    if len(set(domains)) > 1:  # `_mappable` compares only the leader's domain with the engine's
        mappable = (frozenset(),)
    timeout, ranks = options.timeout, engine.layout.tp_ranks
    what = f"{what}: its tensors"
    with steps.step(what, timeout):
        check_equal(ranks, given)
        check_same(ranks, everyones, options.layout == "whole")
        if not everyones[0]:
            raise ConfigError("there are no tensors to send")
        for same in zip(*everyones, strict=True):
            check_cover(same[0].name, same[0].shape, [spec.box for spec in same])
    # Shards need not have the same size on all ranks.
    specs = [max(same, key=lambda spec: spec.nbytes) for same in zip(*everyones, strict=True)]
    ties = [common_tie(spec.same for spec in same) for same in zip(*everyones, strict=True)]
    ours = ranks, given, names_digest(specs), ties, frozenset.intersection(*mappable)
    engines = steps.along(what, ours, timeout)
    check_equal(
        [rank for theirs, *_ in engines for rank in theirs],
        [options for _, theirs, *_ in engines for options in theirs],
    )
    if len({digest for _, _, digest, *_ in engines}) > 1:
        raise ConfigError("the ranks of different engines do not send the same tensors")
    ties = [common_tie(each) for each in zip(*(one[3] for one in engines), strict=True)]
    tied = {spec.name for spec, tie in zip(specs, ties, strict=True) if tie}
    sent = [spec for spec in specs if spec.name not in tied]
    mapped = frozenset.intersection(*(one[4] for one in engines))
    slots = tuple(Slot(spec.name, 0, spec.nbytes) for spec in sent if spec.name in mapped)
    others = [(spec.name, spec.nbytes) for spec in sent if spec.name not in mapped]
    return Plan(
        sources,
        devices[0],
        sent,
        tuple(spec.name for spec in specs if spec.name in tied),
        Bucket(slots) if slots else None,
        buckets_of(others, options.bucket_bytes),
    )


def _checked_sources(
    engine: RolloutEngine | EngineSet, state: Any, options: Options
) -> dict[str, Source]:
    """Check this rank's arguments, and return its tensors."""
    engine._check_call(options.timeout)
    options.check(engine)
    if engine.layout.is_leader:
        engine._engine.control.check("update_weights")
    with limited_waits(min(options.timeout, engine.timeout)):
        sources = sources_of(state, rename=options.rename)
    for source in sources:
        source.check()
        if source.distributed and options.layout == "engine":
            raise ConfigError(
                f"{source.spec.name} is a DTensor, which is sent whole: in the engine's layout "
                "pass this rank's shard (`to_local()`)"
            )
        if source.part is not None and options.layout == "engine":
            raise ConfigError(f"{source.spec.name} is a `Part`: pass layout='whole'")
    return {source.spec.name: source for source in sources}


def _device(sources: Any, options: Options) -> Any:
    """Return the device for buckets, which is the host, the state's GPU, or the current GPU."""
    import torch

    on_gpu = [source.device for source in sources if source.device.type == "cuda"]
    wanted = options.group.device if options.group is not None else None
    if wanted == "cpu" or (wanted is None and not on_gpu and not torch.cuda.is_available()):
        return torch.device("cpu")
    return on_gpu[0] if on_gpu else torch.device("cuda", torch.cuda.current_device())


def _mappable(
    engine: RolloutEngine | EngineSet, options: Options, sources: Mapping[str, Source], device: Any
) -> frozenset[str]:
    """Return the names of the tensors that, according to this rank, the engine can map."""
    if options.group is not None:
        return frozenset()
    found = frozenset(name for name, one in sources.items() if one.can_be_mapped(device))
    backend = engine.backend  # only the leader has a backend
    if found and backend is not None and not backend.maps_regions(options.timeout):
        return frozenset()
    return found
