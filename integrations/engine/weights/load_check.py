"""`LoadCheck`: the verification of a weight load on one rank of an engine."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
from dataclasses import replace
from typing import Any

from memsaver.errors import MemsaverError

from ..messages import Failure
from .adapters import Renamed, without_adapters
from .checks import RankCheck, VerificationRequest
from .digests import digest
from .held import Load, Named, differing, watched
from .model_loader import replaced_loader

__all__ = ["LoadCheck"]

_logger = logging.getLogger("memsaver.engine")


class LoadCheck:
    """The checks of one load on this rank.

    1. Compares the digests of the received tensors with the digests of the sent tensors, and loads
       nothing if any digest differs.
    2. Loads the tensors, and detects tensors from which nothing was written to the model.
    3. Compares the model's contents with the tensors (`held`).

    Attributes:
        trouble: the reason why the load counts as failed even if the engine reports success, or "".
        failure: the failure of the load, or None.

    Args:
        request: the checks to run.
        rank: this process's rank in its engine.
    """

    def __init__(self, request: VerificationRequest, rank: int) -> None:
        self.trouble = ""
        self.failure: Failure | None = None
        self._rank = rank
        self._digests = request.digests(rank)
        self._looked_at = {request.names[at] for at in request.looked_at}
        self._names = request.names
        self._received: set[str] = set()
        self._damaged: set[str] = set()
        self._held: set[str] = set()
        self._differing: set[str] = set()
        self._used: set[str] = set()
        self._unverified: list[str] = []
        self._has_caught = False  # whether the load or the comparison raised an exception

    def fail(self, error: BaseException) -> None:
        """Record an exception as the failure, unless a failure is already recorded."""
        self._has_caught = True
        failure = Failure.of(error)
        if not isinstance(error, MemsaverError):
            failure = replace(failure, message=f"{failure.kind}: {failure.message}")
        self.failure = self.failure or failure

    def found(self) -> RankCheck:
        """Return the result of the checks."""
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

    def around_loader(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """During the block, make the model's loader run the checks before and after each load."""
        return replaced_loader(model, lambda given, load: self.run(model, list(given), load, load))

    def run(self, model: Any, tensors: Named, load: Load, again: Load) -> Any:
        """Load tensors with the checks, and return the result of `load`; None for damaged tensors.

        Args:
            model: a `torch.nn.Module`.
            tensors: the tensors with their names.
            load: a function that loads all tensors.
            again: a function that loads only the tensors that it receives, for the comparison.
        """
        return None if self.is_damaged(tensors) else self.load(model, tensors, load, again)

    def load(self, model: Any, tensors: Named, load: Load, again: Load) -> Any:
        """Load tensors that arrived undamaged, and check the model's weights. See `run`."""
        with without_adapters(model) as renamed:
            result, unused = watched(model, tensors, _with_names(renamed, load))
            self._used.update(name for name, _ in tensors if name not in unused)
            self._refuse_taken(model, tensors)
            self._compare(model, tensors, _with_names(renamed, again))
        return result

    def load_unseen(self, model: Any, tensors: Named, load: Load, why: str) -> None:
        """Load tensors that arrived undamaged, without checking the model's weights.

        The loader itself must reject names that the model does not use.

        Args:
            model: a `torch.nn.Module`.
            tensors: the tensors with their names.
            load: a function that loads all tensors.
            why: the reason why the model's contents cannot be compared.
        """
        with without_adapters(model) as renamed:
            load(renamed(tensors))
        self._used.update(name for name, _ in tensors)
        self._refuse_taken(model, tensors)
        if self._looked_at:
            self._unverified.append(why)

    def is_damaged(self, named: Named) -> bool:
        """Compare the received tensors with the sent tensors; return whether any tensor differs."""
        came = dict(named)
        for name, sent in self._digests.items():
            if name in came and digest(came[name], like=sent) == sent:
                self._received.add(name)
            else:
                self._damaged.add(name)
        if self._damaged:
            names = ", ".join(sorted(self._damaged))
            self.trouble = f"{names} arrived with contents that differ from those sent"
        return bool(self._damaged)

    def _refuse_taken(self, model: Any, named: Named) -> None:
        """Raise an error if the model continues to use the sender's memory."""
        storages = {t.untyped_storage().data_ptr() for _, t in named if t.numel()}
        for name, tensor in model.named_parameters():
            if tensor.numel() and tensor.untyped_storage().data_ptr() in storages:
                raise RuntimeError(
                    f"the model's loader keeps a reference to {name}, which is the sender's "
                    "memory: send tensors that the engine may keep"
                )

    def _compare(self, model: Any, named: Named, load: Load) -> None:
        """Compare the model's contents with the loaded tensors that the request names."""
        chosen = [(n, t) for n, t in named if n in self._looked_at and n in self._used]
        if not chosen:
            return
        try:
            other = differing(model, chosen, load)
        except Exception as error:
            _logger.exception("the model's contents could not be compared with the tensors sent")
            self._has_caught = True
            self._unverified.append(f"{type(error).__name__}: {error}")
            return
        self._held.update(name for name, _ in chosen)
        self._differing.update(other)
        if other:
            names = ", ".join(other)
            self.trouble = f"the model's contents differ from the loaded tensors: {names}"

    def _is_through(self) -> bool:
        """Return whether the bucket was loaded."""
        return self.failure is None and not self._damaged

    def _in_order(self, names: set[str]) -> tuple[str, ...]:
        return tuple(name for name in self._names if name in names)

    def synchronize(self) -> None:
        """Wait until the device has read the sender's memory. Records a failure without raising it.

        Call this method after the load, but not in an `except` block, which would keep its
        exception alive.
        """
        import torch

        if self._has_caught:
            # An exception and the futures of a loader's thread pool refer to each other, which
            # keeps the tensors alive; until they are deleted, the sender cannot pause their tag.
            gc.collect()
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except RuntimeError as error:
            self.fail(error)


def _with_names(renamed: Renamed, load: Load) -> Load:
    return lambda tensors: load(renamed(tensors))
