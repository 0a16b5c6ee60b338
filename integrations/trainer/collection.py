"""The memory of some targets, brought into a tag: what is there now, and what comes later."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from memsaver import observers, simulator
from memsaver.errors import ConfigError, MemsaverWarning
from memsaver.integrations.trainer.device_storages import DeviceStorages
from memsaver.integrations.trainer.guards import (
    check_mapped,
    check_tags_mapped,
    guard_module,
    guard_optimizer,
    guard_parts,
)
from memsaver.integrations.trainer.holdings import (
    Holding,
    gradients_of,
    holdings_of,
    parameters_of,
    parts_of,
    reshard,
    storages_of,
    weights_of,
)
from memsaver.integrations.trainer.places import Places, tag_of
from memsaver.integrations.trainer.simulated_storages import SimulatedStorages
from memsaver.interrupts import signals_deferred
from memsaver.torch_mode import torch_pools

__all__ = ["Collection"]

# Whose frames lie between a program's step and a hook after it.
_BETWEEN = {"memsaver", "torch", "contextlib"}
_watching: weakref.WeakSet[Collection] = weakref.WeakSet()


class Collection:
    """Targets and the tag that their memory goes to. Any thread.

    Refers to optimizers and modules weakly. After `watch` their hooks keep the collection alive.
    Refers to tensors strongly, because `torch.utils.swap_tensors` rejects tensors with weak
    references.
    """

    def __init__(
        self, targets: Sequence[Any], tag: str, *, parameters: bool, gradients: bool
    ) -> None:
        self.tag = tag
        self._targets = [_reference(target) for target in targets]
        self._parameters = parameters
        self._gradients = gradients
        self._memory = SimulatedStorages() if simulator.active() else DeviceStorages()
        self._lock = threading.RLock()
        # By an optimizer's id, the number of its states when they were last gathered.
        self._seen: dict[int, int] = {}
        self._hooks = contextlib.ExitStack()
        self._hooks_of_parts = contextlib.ExitStack()  # from before a pause until after the resume

    @property
    def targets(self) -> list[Any]:
        """Those that still live."""
        return [target for ref in self._targets if (target := ref()) is not None]

    def bytes(self) -> tuple[int, int]:
        """Bytes of the targets' storages in the tag, and of those elsewhere on the device."""
        with self._lock:
            inside = outside = 0
            for storage, _ in self._storages(self.targets, gradients=self._gradients):
                if tag_of(storage) == self.tag:
                    inside += storage.nbytes()
                else:
                    outside += storage.nbytes()
            return inside, outside

    def devices(self) -> list[int]:
        """The indices of the CUDA devices that the targets are on; none on the simulator."""
        found = {storage.device for storage, _ in self._storages(self.targets, gradients=True)}
        return sorted(device.index for device in found if device.type == "cuda")

    def check(self) -> None:
        """Whether all that there is, but for gradients, may go into the tag. Moves nothing.

        Raises:
            ConfigError: something must stay where it is: what it is, and why; or what comes later
                goes to another tag already.
        """
        import torch

        mine = {id(t): t for t in self.targets if isinstance(t, torch.optim.Optimizer)}
        for other in list(_watching):
            for target in other.targets:
                if id(target) in mine and other.tag != self.tag:
                    raise ConfigError(
                        f"the states of this {type(target).__name__} already go to tag "
                        f"{other.tag!r}: pause and resume that tag, or close its handle, which "
                        "offload returned",
                        tag=self.tag,
                    )
        with self._lock:
            self._reshard()
            self._movable(self._outside(self.targets, gradients=False), strict=True)

    def gather(self, *, gradients: bool = True) -> None:
        """Bring into the tag what is not in it, but for what must stay where it is.

        Args:
            gradients: those, too, unless this is made without them.

        Raises:
            OutOfDeviceMemoryError: for a storage, or a batch of them; what was moved before stays
                in the tag, the rest where it was, and the same call goes on from there.
            InvalidStateError: the tag is paused.
        """
        with self._lock:
            self._reshard()
            self._move(self.targets, gradients=self._gradients and gradients)

    def trim(self) -> None:
        """Give back what deleted tensors hold in the tag, gradients' above all: before a pause."""
        with self._lock:
            self._memory.trim(self.tag)

    def watch(self) -> None:
        """Gather from now on what comes later, and refuse work while the tag has no memory.

        Raises:
            ConfigError: a target takes no hooks; none is watched then.
        """
        import torch

        with contextlib.ExitStack() as hooks:
            for target in self.targets:
                if isinstance(target, torch.optim.Optimizer):
                    hooks.enter_context(
                        guard_optimizer(
                            target,
                            self._before_step,
                            self._after_step,
                            self._before_load,
                            self._after_load,
                        )
                    )
                elif isinstance(target, torch.nn.Module):
                    hooks.enter_context(guard_module(target, self._check))
            this = weakref.ref(self)

            def before_pause(tag: str) -> None:
                collection = this()
                if collection is not None:
                    collection.gather()
                    collection.trim()
                    collection._guard_parts()

            def after_resume(tag: str) -> None:
                collection = this()
                if collection is not None:
                    collection._leave_parts()

            for registration in (
                observers.on_pause(before_pause, tag=self.tag),
                observers.on_resume(after_resume, tag=self.tag),
            ):
                weakref.finalize(self, registration.remove).atexit = False
                hooks.callback(registration.remove)
            self._hooks = hooks.pop_all()
            _watching.add(self)

    def unwatch(self) -> None:
        """The end of `watch`; what is in the tag stays there. Twice is allowed."""
        _watching.discard(self)
        self._hooks.close()
        self._leave_parts()

    def _guard_parts(self) -> None:
        import torch

        with self._lock, contextlib.ExitStack() as hooks:
            self._leave_parts()
            for target in self.targets:
                if isinstance(target, torch.nn.Module):
                    hooks.enter_context(guard_parts(target, self._check))
            self._hooks_of_parts = hooks.pop_all()

    def _leave_parts(self) -> None:
        with self._lock:
            self._hooks_of_parts.close()

    def _reshard(self) -> None:
        for target in self.targets:
            reshard(target)

    def _check(self, what: str) -> None:
        check_mapped(self.tag, what)

    def _before_step(self, optimizer: Any) -> None:
        what = "the optimizer's step"
        self._check(what)
        check_tags_mapped(_touched_by_step(optimizer), what)
        if self._seen.get(id(optimizer)) != _size(optimizer):
            self._seen.pop(id(optimizer), None)  # the program has cleared or set some

    def _before_load(self, optimizer: Any) -> None:
        self._check("the optimizer's load_state_dict")

    def _after_load(self, optimizer: Any) -> None:
        self._seen.pop(id(optimizer), None)
        self._after_step(optimizer)

    def _after_step(self, optimizer: Any) -> None:
        """Gather states that are new. What fails here has no caller: the step is done."""
        if self._seen.get(id(optimizer)) == _size(optimizer):
            return
        pools = torch_pools(required=False)
        if pools is not None and pools.is_capturing():
            return  # what a capture makes is the graph's
        try:
            with self._lock:
                self._move([optimizer], gradients=False)
        except RuntimeError as error:  # memsaver's and torch's
            self._seen[id(optimizer)] = _size(optimizer)  # the next step would find the same
            warnings.warn(
                f"states of an optimizer could not be moved into tag {self.tag!r} after the step "
                f"or load_state_dict that made them; the next pause of the tag tries it again: "
                f"{error}",
                MemsaverWarning,
                stacklevel=_frames_of_others(),
            )

    def _move(self, targets: list[Any], *, gradients: bool) -> None:
        import torch

        moving = self._movable(self._outside(targets, gradients=gradients))
        if moving:
            with signals_deferred(), torch.no_grad():
                self._memory.move(moving, self.tag)
        for target in targets:
            if isinstance(target, torch.optim.Optimizer):
                self._seen[id(target)] = _size(target)

    def _outside(self, targets: list[Any], *, gradients: bool) -> list[tuple[Any, Holding]]:
        found = self._storages(targets, gradients=gradients)
        return [pair for pair in found if tag_of(pair[0]) != self.tag]

    def _storages(self, targets: list[Any], *, gradients: bool) -> list[tuple[Any, Holding]]:
        """Return each storage of the targets on the device, with the first holding of it.

        Without `parameters`, leaves out an optimizer's states that share a storage with a
        parameter: they stay with the parameter, wherever it lies.
        """
        import torch

        weights = set(storages_of(h for target in self.targets for h in weights_of(target)))
        holdings = []
        for target in targets:
            held = list(holdings_of(target, self._parameters))
            if isinstance(target, torch.optim.Optimizer):
                own = parameters_of(target) if self._parameters else ()
                left = weights - set(storages_of(h for p in own for h in parts_of(p, "")))
                held = [h for h in held if h.tensor.untyped_storage()._cdata not in left]
            holdings += held
        if gradients:
            holdings += [h for target in targets for h in gradients_of(target)]
        return list(storages_of(filter(self._memory.takes, holdings)).values())

    def _movable(self, outside: list[tuple[Any, Holding]], strict: bool = False) -> list[Any]:
        """Return one tensor for each storage that may be moved.

        Keeps no reference to a storage object, because the references to storages are counted.
        """
        if not outside:
            return []
        places = Places()
        movable = []
        for storage, holding in outside:
            obstacle = places.obstacle(storage, self.tag)
            if obstacle is None:
                movable.append(holding.tensor)
            elif strict:
                raise ConfigError(
                    f"{holding.what} cannot be put into tag {self.tag!r}: it {obstacle}",
                    tag=self.tag,
                )
        return movable


def _reference(target: Any) -> Callable[[], Any]:
    import torch

    return (lambda: target) if isinstance(target, torch.Tensor) else weakref.ref(target)


def _touched_by_step(optimizer: Any) -> Iterator[Holding]:
    """Yield the holdings that a step may read or write: parameters, their gradients, states."""
    yield from holdings_of(optimizer, parameters=True)
    yield from gradients_of(optimizer)


def _size(optimizer: Any) -> int:
    """Return the number of an optimizer's states."""
    states = optimizer.state.values()
    return sum(len(state) if isinstance(state, Mapping) else 1 for state in states)


def _frames_of_others() -> int:
    """The `stacklevel`, for a warning of the caller's, of the innermost frame that is not torch's.

    Between that one and a hook lie as many of torch's as its version and its compiler put there.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BETWEEN:
            break
        frame, level = frame.f_back, level + 1
    return level
