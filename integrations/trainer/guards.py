"""Hooks on optimizers and modules that reject work on paused memory."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias

from memsaver._runtime.native import _C, STATES
from memsaver._transitions.handles import state
from memsaver.errors import ConfigError, InvalidStateError

from .arrivals import order_after_arrival
from .holdings import Holding
from .places import tag_of

__all__ = [
    "Guard",
    "ModuleChecks",
    "StateGuards",
    "check_mapped",
    "check_tags_mapped",
    "guard_module",
    "guard_optimizer",
    "guard_parts",
    "guard_steps",
]

Hook: TypeAlias = Callable[[Any], object]  # called with the optimizer or the module


def check_mapped(tag: str, what: str, memory: list[Any] | None = None) -> None:
    """Raise an InvalidStateError with advice unless the tag is mapped.

    If the tag is being resumed (`Offloaded.resume(wait=False)`), later work waits for the resume,
    or only for the contents of `memory`. See `order_after_arrival`.
    """
    if state(tag) == "mapped" or order_after_arrival(tag, memory):
        return
    now = state(tag)
    if now == "mapped":  # its resume ended between the two checks above
        return
    if now == "paused":
        advice = f"memsaver.resume({tag!r}) first"
    else:
        advice = "wait for the transition in progress"
    raise InvalidStateError(
        f"{what} needs the memory of tag {tag!r}, which is {now}: {advice}; nothing was changed",
        tag=tag,
    )


def check_tags_mapped(holdings: Iterable[Holding], what: str) -> None:
    """Call `check_mapped` for each tag that contains one of the tensors."""
    away = {row["tag"] for row in _C.stats() if STATES[int(row["state"])] != "mapped"}
    if not away:
        return
    for holding in holdings:
        tag = tag_of(holding.tensor.untyped_storage())
        if tag in away:
            check_mapped(tag, f"{what} ({holding.what})")
            away.remove(tag)  # the tag is being resumed


class ModuleChecks(Protocol):
    """The callbacks of `guard_module` and `guard_parts`.

    If a method with the prefix `before_` raises an error, the operation is not executed.
    """

    def before_forward(self, module: Any) -> None:
        """Check a module before a forward pass."""

    def after_forward(self, module: Any) -> None:
        """Handle the end of a target's own forward pass."""

    def before_module_load(self, module: Any) -> None:
        """Called before `load_state_dict`."""

    def before_module_save(self, module: Any) -> None:
        """Called before `state_dict`."""


class Guard:
    """A module hook that calls `check` with the module as its argument.

    A shallow copy of a module shares the module's memory and hooks. A deep copy or an unpickled
    module has its own memory and its own copies of the hooks. A copied or unpickled `Guard` does
    nothing.
    """

    def __init__(self, check: Hook) -> None:
        self._check = check

    def __call__(self, owner: Any, *arguments: Any) -> None:
        """Run the check; torch calls this method with the arguments of a module hook."""
        import torch

        # In compiled code, the check would break the graph, which `fullgraph` forbids. The hooks of
        # the module that `torch.compile` returns run outside the compiled code.
        if not torch.compiler.is_compiling():
            self._check(owner)

    def __reduce__(self) -> tuple[type[_NoGuard], tuple[()]]:
        return _NoGuard, ()


class _NoGuard:
    def __call__(self, *arguments: Any) -> None:
        pass


def guard_optimizer(
    optimizer: Any,
    before_step: Hook,
    stepped: Hook,
    before_load: Hook,
    loaded: Hook,
    before_save: Hook,
) -> contextlib.ExitStack:
    """Install hooks that an optimizer calls around steps and loads and before saves.

    If `before_step`, `before_load` or `before_save` (for `state_dict`) raises an exception, the
    call is not executed. A compiled step is split into separate graphs around the hooks. Copies of
    an optimizer have no hooks.

    Returns:
        An exit stack that removes the hooks when the stack is closed.

    Raises:
        ConfigError: the optimizer does not accept hooks. No hook stays installed.
    """
    with _registering(optimizer) as hooks:
        for register, hook in (
            (optimizer.register_step_pre_hook, before_step),
            (optimizer.register_step_post_hook, stepped),
            (optimizer.register_load_state_dict_pre_hook, before_load),
            (optimizer.register_load_state_dict_post_hook, loaded),
            (optimizer.register_state_dict_pre_hook, before_save),
        ):
            hooks.callback(register(_hooked(hook)).remove)
        return hooks.pop_all()


@functools.cache
def guard_steps(before_step: Hook) -> None:
    """Install a hook that calls `before_step` before each step of any torch optimizer.

    If `before_step` raises an exception, the step is not executed. Further calls with the same
    function have no effect. The hook is never removed, because torch does not allow changes to
    these hooks during another thread's step.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_hooked(before_step))


def guard_module(module: Any, checks: ModuleChecks) -> contextlib.ExitStack:
    """Install a hook that calls `checks.before_forward` before a module's forward passes.

    Returns:
        An exit stack that removes the hook when the stack is closed.

    Raises:
        ConfigError: the module does not accept hooks. No hook stays installed.
    """
    with _registering(module) as hooks:
        _guard_forward(module, checks, hooks)
        return hooks.pop_all()


class StateGuards:
    """Hooks that run before `load_state_dict` and `state_dict` of modules and their submodules.

    The hooks of submodules stay until `close`, because torch does not allow a thread to remove a
    hook during a call.
    """

    def __init__(self) -> None:
        self._hooks = contextlib.ExitStack()
        self._guarded: dict[int, weakref.ref[Any]] = {}  # modules by id: they may compare equal

    def add(self, module: Any, checks: ModuleChecks) -> None:
        """Call `checks` before loads and saves of a module and its submodules, except guarded ones.

        Raises:
            ConfigError: a module does not accept hooks. No hook is added.
        """
        import torch

        loading, saving = Guard(checks.before_module_load), Guard(checks.before_module_save)
        added = {}
        with _registering(module) as hooks:
            for part in module.modules():
                known = self._guarded.get(id(part))
                if isinstance(part, torch.jit.ScriptModule) or (known and known() is part):
                    continue
                hooks.callback(part.register_load_state_dict_pre_hook(loading).remove)
                hooks.callback(part.register_state_dict_pre_hook(saving).remove)
                added[id(part)] = weakref.ref(part)
            self._hooks.push(hooks.pop_all())
        self._guarded.update(added)

    def close(self) -> None:
        """Remove all hooks. Idempotent."""
        self._guarded.clear()
        self._hooks.close()


def guard_parts(module: Any, checks: ModuleChecks) -> contextlib.ExitStack:
    """Guard the forward passes of a module's submodules, and all compiled calls in the module.

    The hooks also call `checks.after_forward` after each forward pass of the module itself.
    Scripted modules accept no hooks, so only the hooks of the containing modules guard them. The
    caller should remove the hooks soon, because each hook costs a few microseconds per forward pass
    and disables torch's fast paths for modules without hooks.
    """
    import torch

    with _registering(module) as hooks:
        for part in module.modules():
            if isinstance(part, torch.jit.ScriptModule):
                continue
            if part is not module:
                _guard_forward(part, checks, hooks)
            _guard_compiled(part, checks, hooks)
        if not isinstance(module, torch.jit.ScriptModule):
            hooks.callback(module.register_forward_hook(Guard(checks.after_forward)).remove)
        return hooks.pop_all()


def _hooked(function: Hook) -> Callable[..., None]:
    import torch

    def hook(owner: Any, *arguments: Any) -> None:
        function(owner)

    return torch.compiler.disable(hook)  # type: ignore[no-any-return]


def _guard_forward(module: Any, checks: ModuleChecks, hooks: contextlib.ExitStack) -> None:
    # This hook must run before FSDP2's hooks, which gather parameters.
    forward = Guard(checks.before_forward)
    hooks.callback(module.register_forward_pre_hook(forward, prepend=True).remove)


class _CompiledCall:
    """A wrapper for the result of `module.compile()` that first runs the checks of all guards.

    A hook cannot perform the checks, because torch compiles the module's hooks along with its code.
    """

    def __init__(self, module: Any, compiled: Callable[..., Any]) -> None:
        self._module, self._compiled = module, compiled
        self._checks: list[ModuleChecks] = []
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for checks in list(self._checks):
            checks.before_forward(self._module)
        return self._compiled(*args, **kwargs)

    def add(self, checks: ModuleChecks) -> None:
        self._checks.append(checks)

    def remove(self, checks: ModuleChecks) -> None:
        """Remove checks; if no checks are left, remove this object from the module."""
        self._checks.remove(checks)
        # The program may have compiled the module again.
        if not self._checks and self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._compiled


def _guard_compiled(module: Any, checks: ModuleChecks, hooks: contextlib.ExitStack) -> None:
    call = getattr(module, "_compiled_call_impl", None)
    if call is None:
        return
    if not isinstance(call, _CompiledCall):
        call = _CompiledCall(module, call)
    call.add(checks)
    hooks.callback(call.remove, checks)


@contextlib.contextmanager
def _registering(target: Any) -> Iterator[contextlib.ExitStack]:
    """Yield a stack of hooks that are removed if the registration of any hook fails.

    Any exception is replaced by a ConfigError, because torch raises many kinds of errors.
    """
    with contextlib.ExitStack() as hooks:
        try:
            yield hooks
        except Exception as error:
            raise ConfigError(
                f"offload needs torch's hooks, and a {type(target).__name__} accepts none: {error}"
            ) from error
