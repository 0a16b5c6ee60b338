"""Hooks on optimizers and modules that refuse to work on memory that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.handles import state
from memsaver.integrations.trainer.holdings import Holding
from memsaver.integrations.trainer.places import tag_of
from memsaver.native import _C, STATES, State

__all__ = [
    "Guard",
    "check_mapped",
    "check_tags_mapped",
    "guard_module",
    "guard_optimizer",
    "guard_parts",
]

Check: TypeAlias = Callable[[str], object]  # of what is about to happen; raises if it must not
Told: TypeAlias = Callable[[Any], object]  # of the optimizer

_FORWARD = "the model's forward"


def check_mapped(tag: str, what: str) -> None:
    """Raise InvalidStateError, which says what to do, unless the tag has its memory."""
    now = state(tag)
    if now is State.MAPPED:
        return
    if now is State.PAUSED:
        advice = f"memsaver.resume({tag!r}) first"
    else:
        advice = "wait for the transition that is under way"
    raise InvalidStateError(
        f"{what} needs the memory of tag {tag!r}, which is {now}: {advice}; nothing has been "
        "touched",
        tag=tag,
    )


def check_tags_mapped(holdings: Iterable[Holding], what: str) -> None:
    """Raise InvalidStateError if a tensor lies in any tag that is not mapped."""
    away = {row["tag"] for row in _C.stats() if STATES[int(row["state"])] is not State.MAPPED}
    if not away:
        return
    for holding in holdings:
        tag = tag_of(holding.tensor.untyped_storage())
        if tag in away:
            check_mapped(tag, f"{what} ({holding.what})")


class Guard:
    """A hook for a module, which asks `check` before that one goes on.

    A shallow copy of a module has the same memory and the same hooks. Other copies have their hooks
    copied, and memory of their own: what a copy or a pickle of this is does nothing.
    """

    def __init__(self, check: Check, what: str) -> None:
        self._check = check
        self._what = what

    def __call__(self, owner: Any, *arguments: Any) -> None:
        """Called by torch, with what it calls hooks of this kind with."""
        import torch

        # In compiled code it would break the graph, which may have to be whole; the hooks of what
        # `torch.compile` returns run outside.
        if not torch.compiler.is_compiling():
            self._check(self._what)

    def __reduce__(self) -> tuple[type[_NoGuard], tuple[()]]:
        return _NoGuard, ()


class _NoGuard:
    def __call__(self, *arguments: Any) -> None:
        pass


def guard_optimizer(
    optimizer: Any, before_step: Told, stepped: Told, before_load: Told, loaded: Told
) -> contextlib.ExitStack:
    """Call functions with the optimizer before and after each step and `load_state_dict`.

    If `before_step` or `before_load` raises, the step or load does not happen. A compiled step is
    broken into graphs around the hooks. Copies of an optimizer have no hooks.

    Returns:
        A stack that removes the hooks when it is closed.

    Raises:
        ConfigError: the optimizer takes no hooks; none is left on it.
    """
    import torch

    def hooked(function: Told) -> Callable[..., None]:
        def hook(owner: Any, *arguments: Any) -> None:
            function(owner)

        return torch.compiler.disable(hook)  # type: ignore[no-any-return]

    with _registering(optimizer) as hooks:
        for register, hook in (
            (optimizer.register_step_pre_hook, before_step),
            (optimizer.register_step_post_hook, stepped),
            (optimizer.register_load_state_dict_pre_hook, before_load),
            (optimizer.register_load_state_dict_post_hook, loaded),
        ):
            hooks.callback(register(hooked(hook)).remove)
        return hooks.pop_all()


def guard_module(module: Any, check: Check) -> contextlib.ExitStack:
    """Call `check` before each forward and `load_state_dict` of a module. See `guard_parts`.

    Returns:
        A stack that removes the hooks when it is closed.

    Raises:
        ConfigError: the module takes no hooks; none is left on it.
    """
    with _registering(module) as hooks:
        _guard(module, check, hooks)
        return hooks.pop_all()


def guard_parts(module: Any, check: Check) -> contextlib.ExitStack:
    """Guard the modules inside a module, as `guard_module` does, and compiled calls of them all.

    Scripted modules take no hooks and are guarded only by the modules around them. Keep the hooks
    for a short time: each costs some microseconds per forward, and torch has fast paths for modules
    without hooks.
    """
    import torch

    with _registering(module) as hooks:
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            if part is not module:
                _guard(part, check, hooks)
            _guard_compiled(part, check, hooks)
        return hooks.pop_all()


def _guard(module: Any, check: Check, hooks: contextlib.ExitStack) -> None:
    forward = Guard(check, _FORWARD)
    loading = Guard(check, "the model's load_state_dict")
    # These must run before FSDP2's hooks, which gather parameters.
    hooks.callback(module.register_forward_pre_hook(forward, prepend=True).remove)
    hooks.callback(module.register_load_state_dict_pre_hook(loading).remove)


def _guard_compiled(module: Any, check: Check, hooks: contextlib.ExitStack) -> None:
    """Guard the result of `module.compile()`, which runs the module's hooks in compiled code."""
    compiled = getattr(module, "_compiled_call_impl", None)
    if compiled is None:
        return

    def guarded(*args: Any, **kwargs: Any) -> Any:
        check(_FORWARD)
        return compiled(*args, **kwargs)

    def restore() -> None:
        if module._compiled_call_impl is guarded:  # it was not compiled again
            module._compiled_call_impl = compiled

    module._compiled_call_impl = guarded
    hooks.callback(restore)


@contextlib.contextmanager
def _registering(target: Any) -> Iterator[contextlib.ExitStack]:
    """A stack of hooks that go when registering one fails: torch's errors are of many kinds."""
    with contextlib.ExitStack() as hooks:
        try:
            yield hooks
        except Exception as error:
            raise ConfigError(
                f"offload guards what it works on by torch's hooks, and a {type(target).__name__} "
                f"takes no hooks: {error}"
            ) from error
