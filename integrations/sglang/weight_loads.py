"""Weight updates in SGLang's scheduler processes: checked, and never the end of one.

SGLang takes a name that the model does not know for a reason to log, and what a loader raises, a
shape that does not match say, ends the engine. For an update that has an `Order` with it, each rank

1. compares what came with what was sent, by digests, and loads nothing where that differs;
2. loads, and sees which tensors nothing of the model was written from;
3. compares what the model holds then with what it was given (`held_weights`);
4. waits for its device: the sender may write over its memory when it has the answer.

All ranks of the group then tell what they found, also one whose load failed. Without an order,
SGLang's own handlers are as ever.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from memsaver.errors import MemsaverError
from memsaver.integrations.sglang.digests import digest
from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.held_weights import Load, Named, differing, watched
from memsaver.integrations.sglang.protocol import Failure
from memsaver.integrations.sglang.ranks import Group
from memsaver.integrations.sglang.weight_checks import Order, RankCheck, answer_text, is_good

__all__ = ["load_broadcast", "load_given", "load_tensors", "load_through"]

_DIRECT = "direct"
_logger = logging.getLogger("memsaver.sglang")


def load_tensors(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.update_weights_from_tensor`."""
    return _load(original, updater, request, meets=True)


def load_broadcast(original: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Around `SchedulerWeightUpdaterManager.update_weights_from_distributed`."""
    return _load(original, updater, request, meets=False)


def load_given(
    original: Callable[..., Any], runner: Any, named_tensors: Any, load_format: str | None = None
) -> Any:
    """Around `WeightUpdater.update_weights_from_tensor`."""
    check = _current[-1] if _current else None
    if check is None or load_format != _DIRECT:
        return load_through(original, runner, named_tensors, load_format)
    direct = sys.modules[type(runner).__module__]._model_load_weights_direct
    model = runner.get_model()
    return check.direct(
        model,
        named_tensors,
        lambda: original(runner, named_tensors, load_format),
        lambda given: direct(model, given),
    )


def load_through(original: Callable[..., Any], runner: Any, *args: Any) -> Any:
    """Around the methods of a runner's `WeightUpdater` that call the model's loader.

    A scheduler has a second runner where it has a draft model.
    """
    check = _current[-1] if _current else None
    if check is None:
        return original(runner, *args)
    with check.around_loader(runner.get_model()):
        result = original(runner, *args)
    return (False, check.trouble) if check.trouble else result


def _load(original: Callable[..., Any], updater: Any, request: Any, *, meets: bool) -> Any:
    """SGLang's handler, with the checks that were ordered. Collective over the group.

    Args:
        original: the handler.
        updater: whose it is.
        request: with an order, or without.
        meets: whether the handler ends with a barrier of the group, where the ranks without an
            error wait for one that has one.
    """
    group = Group(updater.tp_cpu_group)
    try:
        order = Order.from_text(getattr(request, "rid", None))
        if order is not None:
            order.check_ranks(group.size)
    except EngineError as error:  # on all ranks alike, which have the same text
        return _output_of(meets)(success=False, message=str(error))
    if order is None:
        return original(updater, request)
    check = _Check(order, group.rank)
    _current.append(check)
    done, message = False, ""
    try:
        with _flushing_past_waiting(updater):
            output = original(updater, request)
        done, message = output.success, output.message
    except Exception as error:
        _logger.exception("an update of the weights failed")
        check.fail(error)
        if meets:
            group.barrier()
    finally:
        _current.pop()
    if not done and not check.trouble:
        check.failure = check.failure or Failure("EngineError", message)
    _synchronize(check)
    checks = [RankCheck.from_fields(fields) for fields in group.gather(asdict(check.found()))]
    return _output_of(meets)(success=is_good(checks), message=answer_text(checks))


@contextlib.contextmanager
def _flushing_past_waiting(updater: Any) -> Iterator[None]:
    """For the block, requests that wait while the scheduler is paused do not bar a flush.

    They have nothing in the KV cache: a pause took it from those that were running. SGLang 0.5.16
    refuses all the same, which leaves them to go on with what old weights computed; later versions
    see it as this does.
    """
    scheduler: Any = getattr(updater, "scheduler", None)
    if not getattr(scheduler, "_engine_paused", False) or (
        "ignore_waiting" in inspect.signature(updater.is_fully_idle).parameters
    ):
        yield
        return
    flush = updater.flush_cache

    def past_waiting(*args: Any, **named: Any) -> Any:
        waiting, scheduler.waiting_queue = scheduler.waiting_queue, []
        try:
            return flush(*args, **named)
        finally:
            scheduler.waiting_queue = waiting

    updater.flush_cache = past_waiting
    try:
        yield
    finally:
        updater.flush_cache = flush


def _output_of(tensors: bool) -> Any:
    from sglang.srt.managers import io_struct

    if tensors:
        return io_struct.UpdateWeightsFromTensorReqOutput
    return io_struct.UpdateWeightsFromDistributedReqOutput


def _synchronize(check: _Check) -> None:
    """Wait until the device has read what was sent."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        check.fail(error)


class _Check:
    """The checks of one update on this rank.

    Attributes:
        trouble: why the update counts as failed, beside what SGLang says of it; or "".
        failure: what went wrong, or None.
    """

    def __init__(self, order: Order, rank: int) -> None:
        self.trouble = ""
        self.failure: Failure | None = None
        self._rank = rank
        self._digests = order.digests(rank)
        self._looked_at = {order.names[at] for at in order.looked_at}
        self._names = order.names
        self._received: set[str] = set()
        self._damaged: set[str] = set()
        self._held: set[str] = set()
        self._differing: set[str] = set()
        self._used: set[str] = set()
        self._unverified: list[str] = []

    def fail(self, error: BaseException) -> None:
        """Note that the update failed, where it had not before."""
        failure = Failure.of(error)
        if not isinstance(error, MemsaverError):
            failure = replace(failure, message=f"{failure.kind}: {failure.message}")
        self.failure = self.failure or failure

    def found(self) -> RankCheck:
        """What was found."""
        return RankCheck(
            self._rank,
            socket.gethostname(),
            os.getpid(),
            len(self._received),
            len(self._held - self._differing),
            self._in_order(self._damaged),
            self._in_order(self._differing),
            self._in_order(set(self._names) - self._used) if self._is_through() else (),
            "; ".join(dict.fromkeys(self._unverified)),
            self.failure,
        )

    @contextlib.contextmanager
    def around_loader(self, model: Any) -> Iterator[None]:
        """For the block, the model's loader does the checks around its work."""
        theirs = vars(model).get("load_weights")
        load = model.load_weights

        def checked(weights: Iterable[tuple[str, Any]], *args: Any, **named: Any) -> Any:
            given = list(weights)
            return self._through(
                model,
                given,
                lambda tensors: load(tensors, *args, **named),
                lambda tensors: load(tensors, *args, **named),
            )

        model.load_weights = checked
        try:
            yield
        finally:
            if theirs is None:
                del model.load_weights
            else:
                model.load_weights = theirs

    def direct(
        self, model: Any, tensors: Any, original: Callable[[], Any], load: Load
    ) -> tuple[bool, str]:
        """A load past the model's loader, of tensors in the model's own layout.

        Args:
            model: the model.
            tensors: names and tensors.
            original: loads them all, as SGLang does.
            load: loads those that it is given, likewise.
        """
        loaded = self._through(model, list(tensors), lambda _: original(), load)
        return (False, self.trouble) if self.trouble else loaded

    def _through(self, model: Any, named: Named, load: Load, again: Load) -> Any:
        if self._is_damaged(named):
            return None
        result, unused = watched(model, named, load)
        self._used.update(name for name, _ in named if name not in unused)
        self._refuse_taken(model, named)
        self._compare(model, named, again)
        return result

    def _is_damaged(self, named: Named) -> bool:
        """Whether something came otherwise than it was sent."""
        came = dict(named)
        for name, sent in self._digests.items():
            if name in came and digest(came[name], like=sent) == sent:
                self._received.add(name)
            else:
                self._damaged.add(name)
        if self._damaged:
            self.trouble = f"{', '.join(sorted(self._damaged))} came otherwise than sent"
        return bool(self._damaged)

    def _refuse_taken(self, model: Any, named: Named) -> None:
        """Raise where the model goes on using memory that is the sender's."""
        theirs = {t.untyped_storage().data_ptr() for _, t in named if t.numel()}
        for name, tensor in model.named_parameters():
            if tensor.numel() and tensor.untyped_storage().data_ptr() in theirs:
                raise RuntimeError(
                    f"the model's loader keeps what it is given as {name}, which is memory of the "
                    "sender's: send tensors that the engine may keep"
                )

    def _compare(self, model: Any, named: Named, load: Load) -> None:
        """What the model holds with what it was given, of what is to be looked at."""
        chosen = [(n, t) for n, t in named if n in self._looked_at and n in self._used]
        if not chosen:
            return
        try:
            other = differing(model, chosen, load)
        except Exception as error:
            _logger.exception("what the model holds could not be compared with what it was given")
            self._unverified.append(f"{type(error).__name__}: {error}")
            return
        self._held.update(name for name, _ in chosen)
        self._differing.update(other)
        if other:
            self.trouble = f"the model holds something else of {', '.join(other)}"

    def _is_through(self) -> bool:
        """Whether the bucket was loaded."""
        return self.failure is None and not self._damaged

    def _in_order(self, names: set[str]) -> tuple[str, ...]:
        return tuple(name for name in self._names if name in names)


_current: list[_Check] = []  # of the update under way; a scheduler does one thing at a time
