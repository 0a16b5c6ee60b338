"""The memory of some targets, brought into a tag: what is there now, and what comes later."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from memsaver import observers, simulator
from memsaver.errors import ConfigError, MemsaverError, MemsaverWarning
from memsaver.integrations.trainer.device_storages import DeviceStorages
from memsaver.integrations.trainer.guards import check_mapped, guard_module, guard_optimizer
from memsaver.integrations.trainer.holdings import (
    Holding,
    gradients_of,
    holdings_of,
    reshard,
    storages_of,
)
from memsaver.integrations.trainer.places import Places, tag_of
from memsaver.integrations.trainer.simulated_storages import SimulatedStorages
from memsaver.torch_mode import torch_pools

__all__ = ["Collection"]


class Collection:
    """Targets and the tag that their memory goes to. Any thread.

    Targets are referred to weakly. `watch` makes their hooks keep this; without it, this lives as
    long as somebody has it.
    """

    def __init__(
        self, targets: Sequence[Any], tag: str, *, parameters: bool, gradients: bool
    ) -> None:
        self.tag = tag
        self._targets = [weakref.ref(target) for target in targets]
        self._parameters = parameters
        self._gradients = gradients
        self._memory = SimulatedStorages() if simulator.active() else DeviceStorages()
        self._lock = threading.RLock()
        # By optimizer: how many parameters had states when they were last looked for.
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []

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

    def gather(self, *, strict: bool = False) -> None:
        """Bring into the tag what is not in it, but for what must stay where it is.

        Args:
            strict: something that must stay is an error, before anything is moved; and gradients
                are left to the next time.

        Raises:
            ConfigError: with `strict`. What it is, and why it stays.
            OutOfDeviceMemoryError: for a storage, or a batch of them; what was moved before stays
                in the tag, the rest where it was, and the same call goes on from there.
            InvalidStateError: the tag is paused.
        """
        with self._lock:
            for target in self.targets:
                reshard(target)
            self._move(self.targets, gradients=self._gradients and not strict, strict=strict)

    def watch(self) -> None:
        """Gather from now on what comes later, and refuse work while the tag has no memory."""
        import torch

        for target in self.targets:
            if isinstance(target, torch.optim.Optimizer):
                self._undo += guard_optimizer(
                    target, self._check, self._after_step, self._after_load
                )
            elif isinstance(target, torch.nn.Module):
                self._undo += guard_module(target, self._check)
        this = weakref.ref(self)

        def before_pause(tag: str) -> None:
            collection = this()
            if collection is not None:
                collection.gather()

        registration = observers.on_pause(before_pause, tag=self.tag)
        weakref.finalize(self, registration.remove).atexit = False
        self._undo.append(registration.remove)

    def unwatch(self) -> None:
        """The end of `watch`; what is in the tag stays there. Twice is allowed."""
        while self._undo:
            self._undo.pop()()

    def _check(self, what: str) -> None:
        check_mapped(self.tag, what)

    def _after_load(self, optimizer: Any) -> None:
        self._seen.pop(optimizer, None)
        self._after_step(optimizer)

    def _after_step(self, optimizer: Any) -> None:
        """Gather states that are new. What fails here has no caller: the step is done."""
        if self._seen.get(optimizer) == len(optimizer.state):
            return
        pools = torch_pools(required=False)
        if pools is not None and pools.is_capturing():
            return  # what a capture makes is the graph's
        try:
            with self._lock:
                self._move([optimizer], gradients=False)
        except MemsaverError as error:
            warnings.warn(
                f"optimizer states could not be moved into tag {self.tag!r} after the step that "
                f"made them; the next pause of the tag tries it again: {error}",
                MemsaverWarning,
                stacklevel=4,
            )

    def _move(self, targets: list[Any], *, gradients: bool, strict: bool = False) -> None:
        import torch

        found = self._storages(targets, gradients=gradients)
        outside = [pair for pair in found if tag_of(pair[0]) != self.tag]
        moving = self._movable(outside, strict) if outside else []
        if moving:
            with torch.no_grad():
                self._memory.move(moving, self.tag)
        for target in targets:
            if isinstance(target, torch.optim.Optimizer):
                self._seen[target] = len(target.state)

    def _storages(self, targets: list[Any], *, gradients: bool) -> list[tuple[Any, Holding]]:
        """Each storage on the device that targets hold; the first holding of it says what."""
        holdings = [h for target in targets for h in holdings_of(target, self._parameters)]
        if gradients:
            holdings += [h for target in targets for h in gradients_of(target)]
        return list(storages_of(filter(self._memory.takes, holdings)).values())

    def _movable(self, outside: list[tuple[Any, Holding]], strict: bool) -> list[Any]:
        places = Places()
        movable = []
        for storage, holding in outside:
            obstacle = places.obstacle(storage, self.tag)
            if obstacle is None:
                movable.append(storage)
            elif strict:
                raise ConfigError(
                    f"{holding.what} cannot be put into tag {self.tag!r}: it {obstacle}",
                    tag=self.tag,
                )
        return movable
