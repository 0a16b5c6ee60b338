"""`offload`, and the handle that it returns."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Literal, overload

import memsaver
from memsaver._memory.choices import expect_empty
from memsaver._runtime.blocks import Block
from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.native import Backup, check_tag, policy_of
from memsaver._transitions.handles import Transition
from memsaver._transitions.reports import Report
from memsaver.errors import ConfigError, InvalidStateError, NotLoadedError

from .arrivals import begin_arrival
from .collection import Collection, watched
from .targets import targets_in

__all__ = ["Offloaded", "close_all", "has_no_backup", "offload"]

# By id: the open handles to which the program still refers.
_open: weakref.WeakValueDictionary[int, Offloaded] = weakref.WeakValueDictionary()


class Offloaded:
    """A handle for a trainer's memory in a tag, returned by `offload`.

    Any thread may use a handle, but only one thread at a time.

    The hooks on optimizers and modules continue to work without this object. If some targets are
    tensors, keep this object: without it, gradients of these tensors are not moved into the tag,
    and steps that use these tensors while the tag is paused are not rejected.

    Attributes:
        tag: the tag, for memsaver's own functions: `memsaver.swap(out=offloaded.tag, ...)`.
    """

    def __init__(self, collection: Collection) -> None:
        self.tag = collection.tag
        self._collection = collection
        self._is_closed = False
        _open[id(self)] = self

    def __repr__(self) -> str:
        now = "closed" if self._is_closed else str(self.state)
        return f"<memsaver Offloaded: tag {self.tag!r}, {now}>"

    @property
    def state(self) -> memsaver.State:
        """The state of the tag."""
        return memsaver.state(self.tag)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def bytes(self) -> int:
        """The bytes of the targets' tensors in the tag, excluding other memory in the tag.

        Without `reshard_after_forward`, FSDP2 modules have gathered parameters between a forward
        pass and the backward pass. The gathered parameters then count as memory outside the tag,
        and the shards are not counted.
        """
        return int(self._collection.bytes()[0])

    @property
    def bytes_elsewhere(self) -> int:
        """The bytes of the targets' tensors on the device outside the tag.

        They include gradients that no pause has moved yet, tensors that a step has replaced, and
        gradients that must stay in the memory of a CUDA graph or in another tag. DDP's buckets, and
        gradients that FSDP2 accumulates without sharding, are not counted.
        """
        return int(self._collection.bytes()[1])

    @overload
    def pause(self, backup: Backup | None = None, *, wait: Literal[True] = True) -> Report: ...

    @overload
    def pause(self, backup: Backup | None = None, *, wait: Literal[False]) -> Transition: ...

    def pause(self, backup: Backup | None = None, *, wait: bool = True) -> Report | Transition:
        """Move new memory into the tag, and then call `memsaver.pause` with the tag.

        Args:
            backup: see `memsaver.pause`.
            wait: False returns a `memsaver.Transition` as soon as new memory has been moved into
                the tag. Another thread then saves the contents and releases the memory. From that
                moment, the hooks reject work on the memory.

        Raises:
            InvalidStateError: this handle is closed.
            OutOfDeviceMemoryError: too little device memory is free to move new memory into the
                tag. Nothing is paused, and no contents have changed.
            MemsaverError: see `memsaver.pause`.
        """
        self.check_open()
        return memsaver.pause(self.tag, backup=backup, wait=wait)

    @overload
    def resume(self, *, wait: Literal[True] = True) -> Report: ...

    @overload
    def resume(self, *, wait: Literal[False]) -> Transition: ...

    def resume(self, *, wait: bool = True) -> Report | Transition:
        """Call `memsaver.resume` with the tag.

        With `wait=False`, forward and backward passes that use other memory can begin immediately.
        If a hook finds that the tag is being resumed, later work on torch's current streams waits
        for the copies. Hooks run before an optimizer's `step`, `load_state_dict` and `state_dict`,
        and before the forward pass, `load_state_dict` and `state_dict` of a module. If the resume
        has failed, the first of these calls raises the resume's error. The tag is then paused, and
        its backup is intact. All other users of the memory must wait for the returned transition.
        Examples are code that reads `optimizer.state` and a backward pass that adds to paused
        gradients.

        With `offload(by_layer=True)`, the forward pass of each module waits only for the module's
        own parameters, their gradients and the module's buffers, which are restored in address
        order. After the forward pass of the whole target, and before the other calls listed above,
        work waits for all copies.

        Args:
            wait: False returns a `memsaver.Transition` as soon as the resume has begun. With
                `offload(by_layer=True)`, the call returns when all memory is mapped and all copies
                are queued. By then, all backups that are neither in pinned memory nor on other GPUs
                have been read.

        Raises:
            InvalidStateError: this handle is closed.
            MemsaverError: see `memsaver.resume`. All memory of the tag stays paused.
        """
        self.check_open()
        if wait:
            return memsaver.resume(self.tag)
        return begin_arrival(self.tag, until_queued=self._collection.by_layer)

    @property
    def may_overlap(self) -> bool:
        """Whether only calls with hooks use the memory, so that other work can run during a resume.

        The value is True if every target is a module with `offload(by_layer=True)`, or an optimizer
        that has only states (no parameters and no gradients) in the tag. Regions with the tag's
        name are not considered.
        """
        return self._collection.may_overlap()

    def paused(self, backup: Backup | None = None) -> Block[Report]:
        """Call `memsaver.paused` on the tag for a block or for each call of a decorated function.

        A tag that is already paused stays paused. The errors are those of `pause` and `resume`.
        """

        def pausing() -> Block[Report]:
            self.check_open()
            return memsaver.paused(self.tag, backup=backup)

        return Block("paused", pausing, asynchronous=True)

    def close(self) -> None:
        """Remove all hooks. Closing twice is allowed.

        Handles of calls with the same targets and the same tag share their hooks, which are removed
        when the last of these handles is closed. Handles that the program has dropped do not count.
        If a dropped handle of the same tag had only some of these targets, its hooks are also
        removed.

        The tensors stay in the tag at the same addresses, and the tag can still be paused by its
        name. After this call, new memory is no longer moved into the tag.

        Raises:
            InvalidStateError: the tag is paused. Without the hooks, a step on the paused memory
                would not be rejected.
        """
        close_all([self])

    def check_open(self, advice: str = "") -> None:
        """Raise `InvalidStateError` if this handle is closed.

        Args:
            advice: the advice in the error message; "" selects the advice for callers of `pause`
                and `resume`.
        """
        if self._is_closed:
            advice = advice or (
                f"use memsaver.pause({self.tag!r}) to pause the memory in the tag, or call offload "
                "again"
            )
            raise InvalidStateError(
                f"the handle of tag {self.tag!r} is closed: it neither moves new memory nor stops "
                f"the trainer from using paused memory; {advice}",
                tag=self.tag,
            )


def close_all(handles: Sequence[Offloaded]) -> None:
    """Close several handles; if an error is raised, close none.

    Raises:
        InvalidStateError: the tag of a handle is paused. No handle was closed.
    """
    with signals_deferred():
        waiting = [handle for handle in handles if not handle.is_closed]
        for handle in waiting:
            if handle.state != "mapped":
                raise InvalidStateError(
                    f"the handle of tag {handle.tag!r} cannot be closed while the tag is "
                    f"{handle.state}: resume it first",
                    tag=handle.tag,
                )
        for handle in waiting:
            handle._is_closed = True
            _open.pop(id(handle), None)
            if not _handles_of(handle._collection):
                for other in _covered_by(handle._collection):
                    if not _handles_of(other):
                        other.unwatch()
                handle._collection.unwatch()


def _handles_of(collection: Collection) -> list[Offloaded]:
    """Return a collection's open handles to which the program still refers."""
    handles = [reference() for reference in _open.valuerefs()]
    return [one for one in handles if one is not None and one._collection is collection]


def _covered_by(collection: Collection) -> list[Collection]:
    """Return the other watched collections of the same tag whose targets this collection has."""
    targets = set(map(id, collection.targets))
    others = [one for one in watched() if one is not collection and one.tag == collection.tag]
    return [other for other in others if targets.issuperset(map(id, other.targets))]


def _replace_others(collection: Collection) -> None:
    """Stop watching the collections that a new collection replaces.

    It replaces collections with the same targets, whose open handles refer to the new collection
    afterwards, and collections with only some of the targets and without an open handle.
    """
    for other in _covered_by(collection):
        handles = _handles_of(other)
        if not handles or len(other.targets) == len(collection.targets):
            for handle in handles:
                handle._collection = collection
            other.unwatch()


def offload(
    *targets: Any,
    tag: str | None = None,
    backup: Backup | None = None,
    parameters: bool = False,
    gradients: bool = True,
    by_layer: bool = False,
) -> Offloaded:
    """Move a trainer's memory into a tag, so that a pause releases it and a resume restores it.

    A step after a resume produces results that are bitwise identical to those without the pause.
    The address of each tensor changes once. Existing tensors are moved by this call, later states
    after the step that creates them, and gradients by the first pause that finds them. CPU tensors
    (such as step counters) and sparse tensors are not moved.

    Args:
        targets: optimizers (their states), modules (their parameters and buffers), tensors (such as
            master weights that another object owns), or lists or dicts of these objects. Optimizers
            in the attributes of an optimizer or a wrapper, or in containers in these attributes,
            are also targets. Wrappers can be nested in the attributes `optimizer`, `optim` and
            `chained_optimizers`. FSDP2 modules are resharded.
        tag: the tag; None means "optimizer" if the first target is an optimizer, otherwise "model".
            A tag can have several handles, as well as regions.
        backup: see `memsaver.region`. With "none", a pause discards the contents. None means the
            tag's current backup, or "host" for a tag without a backup.
        parameters: whether an optimizer's parameters are also moved; intended for optimizers with
            their own master weights. In a plain trainer, the optimizer's parameters are the model's
            weights. With False, the parameters and any states that share the parameters' memory
            stay in place. To move the parameters, offload the model.
        gradients: whether existing gradients are moved into the tag before each pause.
        by_layer: whether a forward pass can begin before all parameters are restored (see
            `Offloaded.resume`). With True, the caller promises the following until the end of the
            model's forward pass: each parameter and buffer is read only during or after the forward
            pass of a module that owns it, and every such forward pass is a call to the module. A
            model breaks the promise if a module reads a parameter of another module that has not
            been called yet; for example, a fused loss may read `lm_head.weight`. A model also
            breaks the promise if a compiled function calls its modules. A compiled module, or a
            module of one of torch's own classes such as `MultiheadAttention`, also owns the
            parameters of all its submodules for this purpose. Models with FSDP2 modules or scripted
            modules always wait for all memory.

    Existing memory is moved by this call. Later memory is moved after the step that created it,
    after `load_state_dict`, and before each pause of the tag. The search for an optimizer's states
    covers its `state`, its `param_groups` and its attributes. The search looks inside mappings,
    sequences, sets, dataclasses and `SimpleNamespace`s, but no other objects. Single-element
    tensors in `param_groups` and attributes, such as learning rates, stay in place.

    Moving gradients or states needs free memory for one batch of tensors (at most 512 MiB, or a
    single larger tensor), and empties torch's cache.

    While the tag is paused, several calls raise InvalidStateError: an optimizer's `step` and
    `load_state_dict`, and the forward pass and `load_state_dict` of a module or its submodules. A
    step whose parameters, gradients or states are in another paused tag also raises
    InvalidStateError. Other uses of the memory are not detected: backward passes, clipping,
    `zero_grad(set_to_none=False)`, a gradient scaler's `unscale_` and `step`, replays of CUDA
    graphs, and the forward pass of a model that is not a target. The forward pass of a compiled
    model is detected only if the target is the result of `torch.compile`, or if the target was
    compiled in place (`Module.compile`) before the pause. Objects that use the memory's address,
    such as DLPack consumers and CUDA array interfaces, must be created after the call.

    Before you capture CUDA graphs that use the memory, call this function and run a first step. If
    gradients exist across the capture and `gradients` is True, also run a first pause with
    gradients. No other thread may use the memory during the call. An interrupt is raised only after
    all memory is moved.

    The call can be repeated with the same tag. If it has the same targets, it replaces the earlier
    call: its options apply to all handles, and the hooks exist once. If it has additional targets,
    it replaces the earlier call only if the program has dropped the earlier handle.

    Raises:
        ConfigError: a target has an unsupported type or accepts no hooks, the backup is unknown, or
            memory must stay in place, for example because it is in another tag. Nothing is moved,
            and the tag is unchanged.
        InvalidStateError: the tag is paused, or the thread is inside torch's `use_mem_pool`. On the
            simulated driver, this error is also raised if an object other than a Python tensor uses
            the memory.
        OutOfDeviceMemoryError: too little memory is free for the move. Memory that was moved before
            the failure is in the tag, and all other memory stays in place. All of the memory
            remains usable, and repeating the call moves the rest. Until a repeated call succeeds,
            operations on the targets already raise InvalidStateError while the tag is paused, as
            described above.
        NotLoadedError: torch is not installed, or there is no CUDA driver.
    """
    try:
        import torch
    except ImportError:
        raise NotLoadedError("offload is for torch's optimizers and modules; install torch") from (
            None
        )
    found = targets_in(targets)
    if not found:
        raise ConfigError("offload needs an optimizer, a module or a tensor to work on")
    if tag is None:
        tag = "optimizer" if isinstance(found[0], torch.optim.Optimizer) else "model"
    if backup is None and has_no_backup(tag):
        backup = "host"
    collection = Collection(
        found, tag, parameters=parameters, gradients=gradients, by_layer=by_layer
    )
    region = memsaver.region(tag, backup=backup, device=collection.devices() or None)
    collection.check()
    before = collection.bytes()[0]
    handle = Offloaded(collection)  # now, because a concurrent `close` keeps only handles' hooks
    with signals_deferred():
        try:
            collection.watch()
            # Creates the tag with its backup, even if the first step has not created states yet.
            expect_empty(tag)
            with region:
                pass
            collection.gather(gradients=False)
        except BaseException:
            # Otherwise, the hooks stay until the call is repeated, because the tag could be paused
            # while the targets use it.
            _open.pop(id(handle), None)
            if collection.bytes()[0] == before:
                collection.unwatch()
            raise
        _replace_others(collection)
    return handle


def has_no_backup(tag: str) -> bool:
    """Return whether a pause would lose contents because the tag is unknown or has no backup."""
    return policy_of(check_tag(tag)) in ("none", None)
