"""The waits of a model's modules for a resume in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memsaver._transitions.handles import state

from .arrivals import order_after_arrival
from .guards import check_mapped
from .holdings import Holding
from .layers import has_separate_layers, read_by_forward
from .places import tag_of

__all__ = ["ModuleWaits"]


class ModuleWaits:
    """The `ModuleChecks` of the modules of one tag.

    Args:
        owner: kept alive by the hooks that refer to this object.
        tag: the tag.
        by_layer: whether a forward pass may wait for the module's own tensors only.
        takes: returns whether a tensor is one that is moved into tags.
    """

    def __init__(
        self, owner: object, tag: str, by_layer: bool, takes: Callable[[Holding], bool]
    ) -> None:
        self.by_layer = by_layer
        self._owner = owner
        self._tag = tag
        self._takes = takes
        self._has_layers = False

    def examine(self, models: Iterable[Any]) -> None:
        """Decide whether these models can wait by layer. Call before each pause."""
        self._has_layers = self.by_layer and all(map(has_separate_layers, models))

    def before_forward(self, module: Any) -> None:
        """Wait for the module's tensors, or for all."""
        if state(self._tag) == "mapped":
            return
        memory = None
        if self._has_layers:
            tensors = [held.tensor for held in filter(self._takes, read_by_forward(module))]
            memory = [t for t in tensors if tag_of(t.untyped_storage()) == self._tag]
        check_mapped(self._tag, "the model's forward", memory)

    def after_forward(self, module: Any) -> None:
        """Let later work, such as the backward pass, wait for everything."""
        if self._has_layers:
            self.before_module_save(module)

    def before_module_load(self, module: Any) -> None:
        """Wait for everything."""
        check_mapped(self._tag, "the model's load_state_dict")

    def before_module_save(self, module: Any) -> None:
        """Wait for everything. If paused, the `state_dict` only refers to the tensors."""
        if state(self._tag) != "mapped":
            order_after_arrival(self._tag)
