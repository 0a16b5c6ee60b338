"""Move the memory of targets into a tag: existing memory immediately, new memory later."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from memsaver import simulator
from memsaver._memory.torch_mode import torch_pools
from memsaver._runtime.latches import Mutex
from memsaver._transitions import observers
from memsaver._transitions.handles import state
from memsaver.errors import ConfigError, MemsaverWarning

from .arrivals import await_arrival, forget_arrival, order_after_arrival
from .device_storages import DeviceStorages
from .guards import (
    StateGuards,
    check_mapped,
    check_tags_mapped,
    guard_module,
    guard_optimizer,
    guard_parts,
    guard_steps,
)
from .holdings import (
    Holding,
    gradients_of,
    holdings_of,
    parameters_of,
    parts_of,
    reshard,
    storages_of,
    storages_of_live_parameters,
    weights_of,
)
from .layers import has_separate_layers
from .module_waits import ModuleWaits
from .places import Places, tag_of
from .simulated_storages import SimulatedStorages

__all__ = ["Collection", "watched"]

_STEP = "the optimizer's step"
# Packages whose frames lie between the program's step and a hook that runs after it.
_BETWEEN = {"memsaver", "torch", "contextlib"}
# By id. `list` copies a dictionary's values in one step, even if other threads change it.
_watching: dict[int, weakref.ref[Collection]] = {}


def watched() -> list[Collection]:
    """Return the collections between `watch` and `unwatch`."""
    found = [reference() for reference in list(_watching.values())]
    return [collection for collection in found if collection is not None]


def _before_any_step(optimizer: Any) -> None:
    for collection in watched():
        collection._before_any_step(optimizer)


class Collection:
    """The targets of a handle, and the tag to which their memory is moved. Any thread.

    A collection has weak references to optimizers and modules. After `watch`, their hooks keep the
    collection alive. A collection owns strong references to tensors, because
    `torch.utils.swap_tensors` rejects tensors with weak references.
    """

    def __init__(
        self,
        targets: Sequence[Any],
        tag: str,
        *,
        parameters: bool,
        gradients: bool,
        by_layer: bool,
    ) -> None:
        self.tag = tag
        self._targets = [_reference(target) for target in targets]
        self._parameters = parameters
        self._gradients = gradients
        self._memory = SimulatedStorages() if simulator.active() else DeviceStorages()
        self.takes = self._memory.takes
        self.by_layer = by_layer
        self.has_layers = False  # whether the modules can wait by layer; decided before each pause
        self._lock = Mutex()
        self._states = StateGuards()
        # By an optimizer's id, the number of its states when they were last gathered.
        self._seen: dict[int, int] = {}
        self._hooks = contextlib.ExitStack()
        self._hooks_of_parts = contextlib.ExitStack()  # from before a pause until after the resume

    @property
    def targets(self) -> list[Any]:
        """The targets that are still alive."""
        return [target for ref in self._targets if (target := ref()) is not None]

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of the targets' storages in the tag and elsewhere on the device."""
        with self._lock.locked():
            inside = outside = 0
            for storage, _ in self._storages(self.targets, gradients=self._gradients):
                if tag_of(storage) == self.tag:
                    inside += storage.nbytes()
                else:
                    outside += storage.nbytes()
            return inside, outside

    def may_overlap(self) -> bool:
        """Return whether only hooked calls use the memory. See `Offloaded.may_overlap`."""
        import torch

        if self._parameters:
            return False
        optimizers = [t for t in self.targets if isinstance(t, torch.optim.Optimizer)]
        others = [t for t in self.targets if not isinstance(t, torch.optim.Optimizer)]
        if not all(self.by_layer and isinstance(other, torch.nn.Module) for other in others):
            return False
        gradients = (held for optimizer in optimizers for held in gradients_of(optimizer))
        return all(tag_of(held.tensor.untyped_storage()) != self.tag for held in gradients)

    def devices(self) -> list[int]:
        """Return the indices of the targets' CUDA devices; [] on the simulated driver."""
        found = {storage.device for storage, _ in self._storages(self.targets, gradients=True)}
        return sorted(device.index for device in found if device.type == "cuda")

    def check(self) -> None:
        """Check that all existing memory except gradients can be moved into the tag. Moves nothing.

        Raises:
            ConfigError: some memory must stay in place, or another collection moves an optimizer's
                new states to another tag. The message names the memory and the reason.
        """
        import torch

        mine = {id(t): t for t in self.targets if isinstance(t, torch.optim.Optimizer)}
        for other in watched():
            for target in other.targets:
                if id(target) in mine and other.tag != self.tag:
                    raise ConfigError(
                        f"the states of this {type(target).__name__} already go to tag "
                        f"{other.tag!r}: pause and resume that tag, or close the handle that "
                        "offload returned; after an offload that failed, repeat it with that tag",
                        tag=self.tag,
                    )
        with self._lock.locked():
            self._reshard()
            self._movable(self._outside(self.targets, gradients=False), strict=True)

    def gather(self, *, gradients: bool = True) -> None:
        """Move the targets' memory into the tag, except memory that is already there or must stay.

        Args:
            gradients: whether to also move gradients; ignored if this object excludes gradients.

        Raises:
            OutOfDeviceMemoryError: too little memory is free for a storage or a batch. Memory
                already moved stays in the tag, and a repeated call moves the rest.
            InvalidStateError: the tag is paused.
        """
        with self._lock.locked():
            self._reshard()
            self._move(self.targets, gradients=self._gradients and gradients)

    def trim(self) -> None:
        """Release the memory of deleted tensors in the tag, mainly of gradients."""
        with self._lock.locked():
            self._memory.trim(self.tag)

    def watch(self) -> None:
        """Begin to move new memory into the tag, and to reject work while the tag is not mapped.

        Raises:
            ConfigError: a target accepts no hooks. No target is watched.
        """
        import torch

        with contextlib.ExitStack() as hooks:
            hooks.callback(self._states.close)
            for target in self.targets:
                if isinstance(target, torch.optim.Optimizer):
                    hooks.enter_context(
                        guard_optimizer(
                            target,
                            self._before_step,
                            self._after_step,
                            self._before_load,
                            self._after_load,
                            self._before_save,
                        )
                    )
                elif isinstance(target, torch.nn.Module):
                    hooks.enter_context(guard_module(target, ModuleWaits(self)))
                    self._states.add(target, ModuleWaits(self))
            this = weakref.ref(self)

            def before_pause(tag: str) -> None:
                forget_arrival(tag)
                collection = this()
                if collection is not None:
                    collection.gather()
                    collection.trim()
                    collection._guard_parts()

            def after_resume(tag: str) -> None:
                forget_arrival(tag)
                collection = this()
                if collection is not None:
                    collection._leave_parts()

            guard_steps(_before_any_step)
            for registration in (
                observers.on_pause(before_pause, tag=self.tag),
                observers.on_resume(after_resume, tag=self.tag),
            ):
                weakref.finalize(self, registration.remove).atexit = False
                hooks.callback(registration.remove)
            self._hooks = hooks.pop_all()
            key = id(self)
            _watching[key] = weakref.ref(self, lambda _: _watching.pop(key, None))

    def unwatch(self) -> None:
        """Undo `watch`; memory already moved stays in the tag. Idempotent."""
        _watching.pop(id(self), None)
        self._hooks.close()
        self._leave_parts()

    def _guard_parts(self) -> None:
        import torch

        with self._lock.locked(), contextlib.ExitStack() as hooks:
            self._leave_parts()
            for target in self.targets:
                if isinstance(target, torch.nn.Module):
                    self._states.add(target, ModuleWaits(self))  # parts that are new
                    hooks.enter_context(guard_parts(target, ModuleWaits(self)))
            self._hooks_of_parts = hooks.pop_all()
            modules = [t for t in self.targets if isinstance(t, torch.nn.Module)]
            self.has_layers = self.by_layer and all(map(has_separate_layers, modules))

    def _leave_parts(self) -> None:
        with self._lock.locked():
            self._hooks_of_parts.close()

    def _reshard(self) -> None:
        for target in self.targets:
            reshard(target)

    def _check(self, what: str) -> None:
        check_mapped(self.tag, what)

    def _before_any_step(self, optimizer: Any) -> None:
        if state(self.tag) == "mapped":
            return
        if all(optimizer is not target for target in self.targets):  # `_before_step` checks targets
            check_tags_mapped(_touched_by_step(optimizer), _STEP)

    def _before_step(self, optimizer: Any) -> None:
        self._check(_STEP)
        check_tags_mapped(_touched_by_step(optimizer), _STEP)
        if self._seen.get(id(optimizer)) != _size(optimizer):
            self._seen.pop(id(optimizer), None)  # the program has deleted or added states

    def _before_load(self, optimizer: Any) -> None:
        self._check("the optimizer's load_state_dict")

    def _before_save(self, optimizer: Any) -> None:
        order_after_arrival(self.tag)  # if paused, the state_dict only refers to its tensors

    def _after_load(self, optimizer: Any) -> None:
        self._seen.pop(id(optimizer), None)
        self._after_step(optimizer)

    def _after_step(self, optimizer: Any) -> None:
        """Move new states into the tag; warn about failures, because the step is complete."""
        if self._seen.get(id(optimizer)) == _size(optimizer):
            return
        pools = torch_pools(required=False)
        if pools is not None and pools.is_capturing():
            return  # memory that is allocated during a capture belongs to the graph
        try:
            # Waits without the lock, because callbacks at the end of the arrival acquire it.
            await_arrival(self.tag)
            with self._lock.locked():
                self._move([optimizer], gradients=False)
        except RuntimeError as error:  # memsaver's and torch's
            self._seen[id(optimizer)] = _size(optimizer)  # the next step would fail the same way
            warnings.warn(
                f"states of an optimizer could not be moved into tag {self.tag!r} after the step "
                f"or load_state_dict that created them; the next pause of the tag tries again: "
                f"{error}",
                MemsaverWarning,
                stacklevel=_frames_of_others(),
            )

    def _move(self, targets: list[Any], *, gradients: bool) -> None:
        import torch

        moving = self._movable(self._outside(targets, gradients=gradients))
        if moving:
            with torch.no_grad():
                self._memory.move(moving, self.tag)
        for target in targets:
            if isinstance(target, torch.optim.Optimizer):
                self._seen[id(target)] = _size(target)

    def _outside(self, targets: list[Any], *, gradients: bool) -> list[tuple[Any, Holding]]:
        found = self._storages(targets, gradients=gradients)
        return [pair for pair in found if tag_of(pair[0]) != self.tag]

    def _storages(self, targets: list[Any], *, gradients: bool) -> list[tuple[Any, Holding]]:
        """Return each of the targets' storages on the device, with the first tensor found in it.

        Without `parameters`, an optimizer's states that share a storage with a parameter are
        omitted, because they stay with the parameter. For states that are not in the tag yet, the
        parameters of all other objects in the process are also considered.
        """
        import torch

        weights = set(storages_of(h for target in self.targets for h in weights_of(target)))
        holdings = []
        for target in targets:
            held = list(holdings_of(target, self._parameters))
            if isinstance(target, torch.optim.Optimizer):
                own = parameters_of(target) if self._parameters else ()
                mine = set(storages_of(h for p in own for h in parts_of(p, "")))
                held = _without(held, weights - mine)
                if self._has_outside(held):
                    held = _without(held, storages_of_live_parameters() - mine)
            holdings += held
        if gradients:
            holdings += [h for target in targets for h in gradients_of(target)]
        return list(storages_of(filter(self._memory.takes, holdings)).values())

    def _has_outside(self, holdings: list[Holding]) -> bool:
        found = storages_of(filter(self._memory.takes, holdings))
        return any(tag_of(storage) != self.tag for storage, _ in found.values())

    def _movable(self, outside: list[tuple[Any, Holding]], strict: bool = False) -> list[Any]:
        """Return one tensor for each storage that can be moved.

        The function keeps no reference to a storage object, because references to storages are
        counted.
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


def _without(holdings: list[Holding], storages: set[int]) -> list[Holding]:
    return [h for h in holdings if h.tensor.untyped_storage()._cdata not in storages]


def _touched_by_step(optimizer: Any) -> Iterator[Holding]:
    """Yield the tensors that a step might access: parameters, their gradients, and states."""
    yield from holdings_of(optimizer, parameters=True)
    yield from gradients_of(optimizer)


def _size(optimizer: Any) -> int:
    """Return the number of an optimizer's states."""
    states = optimizer.state.values()
    return sum(len(state) if isinstance(state, Mapping) else 1 for state in states)


def _frames_of_others() -> int:
    """Return the `stacklevel` that attributes the caller's warning to a frame of the program.

    The number of torch's frames between the two depends on the versions of torch and its compiler.
    """
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _BETWEEN:
            break
        frame, level = frame.f_back, level + 1
    return level
