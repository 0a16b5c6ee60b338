"""The optimizers, modules and tensors in the arguments of `offload`."""

from __future__ import annotations

from typing import Any

from memsaver.errors import ConfigError

from .nested import leaves

__all__ = ["targets_in"]


def targets_in(values: Any) -> list[Any]:
    """Return the targets in a container in order, without duplicates.

    A module or a tensor is itself a target. For an optimizer or a wrapper such as accelerate's, all
    optimizers inside the object are targets.

    Raises:
        ConfigError: a value is not a target and contains no optimizer, or a module is not hashable.
    """
    import torch

    found: dict[int, Any] = {}  # by id, because targets may have no hash or compare equal
    for target, _ in leaves(values):
        inside = [target]
        if isinstance(target, torch.nn.Module):
            _check_hash(target)
        elif not isinstance(target, torch.Tensor):
            inside = _optimizers_in(target)
        if not inside:
            raise ConfigError(
                f"offload takes torch optimizers, modules and tensors, not {type(target).__name__}"
            )
        found.update((id(one), one) for one in inside)
    return list(found.values())


def _check_hash(module: Any) -> None:
    try:
        list(module.modules())
    except TypeError as error:
        raise ConfigError(
            f"torch cannot list the parts of a {type(module).__name__}: {error}; modules must be "
            "hashable, and a class that defines __eq__ is not: define __hash__ = "
            "torch.nn.Module.__hash__ in it, or make it a @dataclass(eq=False)"
        ) from error


def _optimizers_in(target: Any) -> list[Any]:
    """Return all optimizers in an object, including an optimizer itself, outermost first.

    Some wrappers derive from torch's class without initializing it and only forward calls to
    another optimizer. The result omits such wrappers. Objects of other classes are searched only if
    they are in an attribute named in `_WRAPPED`, up to `_MAX_NESTING` such objects deep.
    """
    import torch

    found: list[Any] = []
    seen: set[int] = set()
    waiting = [(target, 0)]
    while waiting:
        one, depth = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.optim.Optimizer) and "state" in vars(one):
            found.append(one)
        wrapped = [value for value, _ in leaves([_attribute(one, name) for name in _WRAPPED])]
        own = getattr(one, "__dict__", {})
        values = [value for name, value in own.items() if name not in _WITHOUT_OPTIMIZERS]
        inside = [*wrapped, *(value for value, _ in leaves(values))]
        waiting += [(value, 0) for value in inside if isinstance(value, torch.optim.Optimizer)]
        if depth < _MAX_NESTING:
            wholes = torch.optim.Optimizer | torch.nn.Module | torch.Tensor
            waiting += [(value, depth + 1) for value in wrapped if not isinstance(value, wholes)]
    return found


def _attribute(wrapper: Any, name: str) -> Any:
    """Return an attribute; None if it does not exist or cannot be read."""
    try:
        return getattr(wrapper, name, None)
    except Exception:  # a property of another library's class
        return None


# The attributes that contain a wrapper's optimizers, which can be wrappers themselves: for torch
# and DeepSpeed, for other libraries, and for Megatron-LM.
_WRAPPED = ("optimizer", "optim", "chained_optimizers")
_MAX_NESTING = 4  # ends the search in objects that create every attribute that is read


# Attributes of an optimizer that are large, full of tensors, and contain no optimizers.
_WITHOUT_OPTIMIZERS = {"state", "param_groups"}
