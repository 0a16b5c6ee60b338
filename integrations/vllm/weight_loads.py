"""Load weights from a trainer into the models of vLLM's workers.

The plugin adds functions to vLLM's worker as methods, and every rank of an executor calls them.
The ranks exchange their results before any rank answers, and each answer contains the results of
all ranks. A failure is never raised: after a rank's exception, the multiprocessing executor would
leave the responses of the following ranks in its queues, and its next call would read them. An
interrupt or an exit is raised on the interrupted rank after the exchange.

If a bucket arrives damaged on one rank, no rank loads the bucket. If a load fails on one rank, the
load counts as failed on all ranks.

After loading, vLLM converts quantized weights and weights whose kernels use another layout. The
buckets for these models are loaded through vLLM's layerwise reload, as in vLLM's own engines for
weight transfers. The reload keeps tensors until a layer is complete, and then loads, converts and
copies them into the layer's memory. For all other models, each bucket is loaded directly into the
model's memory, and the contents are compared with the received tensors.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

from memsaver.errors import InvalidStateError

from ..engine import held
from ..engine.errors import EngineError
from ..engine.interface import Broadcast, SharedTensors
from ..engine.messages import Failure
from ..engine.tags import WEIGHTS
from ..engine.weights.checks import RankCheck, VerificationRequest, is_good
from ..engine.weights.groups import Receiver
from ..engine.weights.load_check import LoadCheck
from ..engine.weights.payloads import named_tensors
from ..engine.weights.writes import Named
from .executor_ranks import group_of as ranks_of
from .logs import logger
from .protocol import BEGIN, END, JOIN, LEAVE, LOAD, Coming, group_of
from .reload import LayerwiseReload, is_converted
from .worker import installed_allocator

__all__ = ["install"]

_UPDATE, _GROUPS = "_memsaver_update", "_memsaver_groups"  # attributes of a worker
_CONVERTED = "vLLM converts this model's weights after loading, so they differ from those sent"

Rows = list[dict[str, Any]]


def install(worker: Any) -> None:
    """Add the functions to vLLM's worker class as methods. Idempotent."""
    calls = ((BEGIN, _begin), (LOAD, _load), (END, _end), (JOIN, _join), (LEAVE, _leave))
    for name, call in calls:
        setattr(worker, name, call)


def _begin(worker: Any) -> Rows:
    """Begin an update; abandon any earlier update that was not ended."""

    def work() -> None:
        _check_awake()
        _abandon(worker)
        setattr(worker, _UPDATE, _Update(worker))

    return _on_all_ranks(worker, work)


def _end(worker: Any) -> Rows:
    """End an update, if there is one. A refused call can be repeated."""

    def work() -> None:
        update: _Update | None = getattr(worker, _UPDATE, None)
        if update is not None and update.is_reloading:
            _check_awake()
        setattr(worker, _UPDATE, None)
        if update is not None:
            update.end()
            update.check_kept()

    return _on_all_ranks(worker, work)


def _load(worker: Any, fields: dict[str, Any]) -> Rows:
    """Load a bucket, and return the results of all ranks."""
    group = ranks_of(worker)
    try:
        coming = Coming(fields)
        request = coming.verification or VerificationRequest()
        request.check_ranks(group.size)
    except EngineError as error:  # on all ranks, because their messages are equal
        return [asdict(_failed(rank, error)) for rank in range(group.size)]
    check = LoadCheck(request, group.rank)
    tensors: Named = []

    def arrive() -> dict[str, Any]:
        nonlocal tensors
        _check_awake()
        tensors = _arrived(worker, coming, group.rank)
        return {"arrived": not check.is_damaged(tensors)}

    def not_arrived(error: BaseException) -> dict[str, Any]:
        logger.error("new weights did not arrive", exc_info=error)
        check.fail(error)
        return {"arrived": False}

    def load() -> dict[str, Any]:
        # After an interrupt in the first exchange, this rank still joins the second one, in which
        # other ranks wait.
        arrived = group.collect(arrive, not_arrived)
        try:
            if all(row["arrived"] for row in arrived):
                _update_of(worker).load(check, tensors, coming)
        except Exception as error:
            logger.exception("a weight update failed")
            check.fail(error)
        check.synchronize()
        return asdict(check.found())

    def interrupted(error: BaseException) -> dict[str, Any]:
        check.fail(error)
        return asdict(check.found())

    checks = [RankCheck.from_fields(row) for row in group.collect(load, interrupted)]
    if getattr(worker, _UPDATE, None) is not None and not is_good(checks):
        _update_of(worker).failed = True
    return [asdict(one) for one in checks]


def _update_of(worker: Any) -> _Update:
    """Return the update in progress; begin one if there is none."""
    update: _Update = getattr(worker, _UPDATE, None) or _Update(worker)
    setattr(worker, _UPDATE, update)
    return update


def _arrived(worker: Any, coming: Coming, rank: int) -> Named:
    """Wait for the tensors of a bucket, and return them."""
    if isinstance(coming.tensors, SharedTensors):
        return named_tensors(coming.tensors.payloads[rank])
    return _received(worker, coming.tensors, coming.timeout)


def _received(worker: Any, coming: Broadcast, timeout: float) -> Named:
    import torch

    group = _groups(worker).get(coming.group_name)
    if group is None:
        raise InvalidStateError(f"this rank has not joined the group {coming.group_name!r}")
    tensors = []
    for dtype, shape in zip(coming.dtypes, coming.shapes, strict=True):
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise EngineError(f"torch has no type {dtype!r}")
        tensors.append(torch.empty(shape, dtype=kind, device=group.device(worker.device)))
    group.receive(tensors, timeout)
    return list(zip(coming.names, tensors, strict=True))


class _Update:
    """An update on one rank, from its beginning to its end.

    Attributes:
        failed: whether any rank failed to load a bucket.
    """

    def __init__(self, worker: Any) -> None:
        self.failed = False
        self._losses = _losses()
        self._worker = worker
        self._model = worker.model_runner.get_model()
        self._converted = is_converted(self._model)
        self._reload: LayerwiseReload | None = None

    @property
    def is_reloading(self) -> bool:
        """Whether `end` writes to the weights."""
        return self._reload is not None

    def load(self, check: LoadCheck, tensors: Named, coming: Coming) -> None:
        """Load a bucket that has arrived intact."""
        is_whole = isinstance(coming.tensors, Broadcast) or coming.tensors.layout == "whole"
        with _configuration_of(self._worker):
            if not is_whole:
                check.load(self._model, tensors, self._write, self._write)
            elif not self._converted:
                check.load(self._model, tensors, self._model.load_weights, self._model.load_weights)
            else:
                if self._reload is None:
                    self._reload = LayerwiseReload(self._model, self._worker.model_config)
                check.load_unseen(self._model, tensors, self._reload.load, _CONVERTED)

    def _write(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Copy tensors that already have the layout of the model's parameters."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, tensor in tensors:
            held = parameters.get(name)
            if held is None:
                continue  # a tensor that counts as unused
            if held.shape != tensor.shape:
                raise EngineError(
                    f"the parameter {name} has the shape {tuple(held.shape)}, but its tensor "
                    f"has {tuple(tensor.shape)}"
                )
            held.data.copy_(tensor)

    def check_kept(self) -> None:
        """Raise `EngineError` if a sleep has discarded the weights since the update began."""
        if _losses() != self._losses:
            raise EngineError(
                "a sleep discarded the weights during the update: send all of them again"
            )

    def end(self) -> None:
        """Complete the last layers, or restore their old weights if the update failed."""
        reload, self._reload = self._reload, None
        if reload is not None:
            with _configuration_of(self._worker):
                reload.end(self.failed)
            held.release_cache()


def _configuration_of(worker: Any) -> AbstractContextManager[None]:
    """Set vLLM's current configuration, which loaders and conversions of weights read."""
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(worker.vllm_config)  # type: ignore[no-any-return]


def _abandon(worker: Any) -> None:
    update: _Update | None = getattr(worker, _UPDATE, None)
    if update is not None:
        update.failed = True
        setattr(worker, _UPDATE, None)
        update.end()


def _losses() -> int:
    """Return the number of releases that have discarded the weights."""
    allocator = installed_allocator()
    return 0 if allocator is None else allocator.losses


def _check_awake() -> None:
    """Raise `InvalidStateError` if the memory of the weights is released."""
    allocator = installed_allocator()
    if allocator is not None and WEIGHTS in allocator.released:
        raise InvalidStateError(
            'the memory of the weights is released: wake the engine up first (tags=["weights"])',
            tag=WEIGHTS,
        )


# --- groups ---------------------------------------------------------------------------------------


def _groups(worker: Any) -> dict[str, Receiver]:
    """Return the groups that this rank has joined."""
    if not hasattr(worker, _GROUPS):
        setattr(worker, _GROUPS, {})
    found: dict[str, Receiver] = getattr(worker, _GROUPS)
    return found


def _join(worker: Any, fields: dict[str, Any], timeout: float) -> Rows:
    """Join a process group whose rank 0 sends weights."""

    def work() -> None:
        request = group_of(fields)
        rank = request.rank_offset + ranks_of(worker).rank
        where = request.name, request.address, request.port, request.backend
        _groups(worker)[request.name] = Receiver(*where, rank, request.world_size, timeout)

    return _on_all_ranks(worker, work)


def _leave(worker: Any, name: str) -> Rows:
    """Leave a process group."""

    def work() -> None:
        member = _groups(worker).pop(name, None)
        if member is None:
            raise EngineError(f"this rank has not joined the group {name!r}")
        member.close()

    return _on_all_ranks(worker, work)


# --- ranks ----------------------------------------------------------------------------------------


def _on_all_ranks(worker: Any, work: Callable[[], None]) -> Rows:
    """Run `work` on this rank, and return the results of all ranks. Collective."""
    group = ranks_of(worker)

    def done() -> dict[str, Any]:
        work()
        return asdict(RankCheck(group.rank, socket.gethostname(), os.getpid()))

    def failed(error: BaseException) -> dict[str, Any]:
        logger.error("a memsaver call failed", exc_info=error)
        return asdict(_failed(group.rank, error))

    return group.collect(done, failed)


def _failed(rank: int, error: BaseException) -> RankCheck:
    failure = Failure.of(error)
    check = RankCheck(rank, socket.gethostname(), os.getpid(), failure=failure)
    if isinstance(error, EngineError | InvalidStateError):
        return check
    return replace(check, failure=replace(failure, message=f"{failure.kind}: {failure.message}"))
