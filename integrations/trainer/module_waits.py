"""Make a model's modules wait for a background resume."""

from __future__ import annotations

from typing import Any, Protocol

from memsaver._transitions.handles import state

from .arrivals import await_arrival, order_after_arrival
from .guards import check_mapped
from .holdings import Holding, is_fsdp2
from .layers import read_by_forward
from .places import tag_of

__all__ = ["ModuleWaits"]


class Owner(Protocol):
    """The owner of the modules' memory.

    Attributes:
        tag: the tag of the memory.
        has_layers: whether a forward pass waits only for the module's own tensors.
    """

    tag: str
    has_layers: bool

    def takes(self, holding: Holding) -> bool:
        """Return whether a tensor can be moved into a tag."""


class ModuleWaits:
    """The `ModuleChecks` for an owner's modules. The modules' hooks keep the owner alive."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def before_forward(self, module: Any) -> None:
        """Wait for the module's own tensors or for all tensors.

        For an FSDP2 module after `set_post_optim_event`, the host waits for all copies.
        """
        tag = self._owner.tag
        if state(tag) == "mapped":
            return
        memory = None
        if self._owner.has_layers:
            tensors = [held.tensor for held in filter(self._owner.takes, read_by_forward(module))]
            memory = [t for t in tensors if tag_of(t.untyped_storage()) == tag]
        check_mapped(tag, "the model's forward", memory)
        if _has_event(module):
            await_arrival(tag)

    def after_forward(self, module: Any) -> None:
        """Make later work, such as the backward pass, wait for all tensors."""
        if self._owner.has_layers:
            order_after_arrival(self._owner.tag)

    def before_module_load(self, module: Any) -> None:
        """Wait for all tensors."""
        check_mapped(self._owner.tag, "the model's load_state_dict")

    def before_module_save(self, module: Any) -> None:
        """Wait for all tensors. If the tag is paused, the `state_dict` refers to paused tensors."""
        order_after_arrival(self._owner.tag)


def _has_event(module: Any) -> bool:
    """Return whether FSDP2 gathers the next parameters without waiting for torch's current stream.

    After `set_post_optim_event`, FSDP2's streams wait only for that event.
    """
    if not is_fsdp2(module):
        return False
    context = getattr(module._get_fsdp_state(), "_state_ctx", None)
    return getattr(context, "post_optim_event", None) is not None
