"""A trainer's state as tensors that can be written to a bucket."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import memsaver
from memsaver._memory.sharing.sending import can_send
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError, InvalidStateError, NotLoadedError

from ...engine.fields import is_encodable
from ...trainer.holdings import parts_of
from .parts import Box, Part

__all__ = ["Rename", "Source", "Spec", "sources_of", "state_of"]

Rename = Callable[[str], "str | None"]


@dataclass(frozen=True)
class Spec:
    """The description of a tensor, without its contents.

    Attributes:
        name: the tensor's name.
        dtype: the tensor's type, such as "bfloat16".
        shape: the shape of the whole tensor, or of the shard if the engine receives shards.
        nbytes: the size in bytes, without gaps between elements.
        same: the name of an earlier tensor with the same memory, or "". None if this rank has no
            element of the tensor, and therefore cannot compare its memory.
        box: the part of the tensor that this rank has, if the tensor is a `Part`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    same: str | None = ""
    box: Box | None = None


class Source:
    """A tensor of a trainer's state.

    Attributes:
        spec: the tensor's description.
        device: the device of this rank's part.
        distributed: whether the tensor is a DTensor, of which each rank has a part.
        part: the `Part` that is written to the buckets of all ranks; None for other tensors.
    """

    def __init__(self, spec: Spec, tensor: Any, part: Part | None = None) -> None:
        self.spec = spec
        self.part = part
        self._tensor = tensor
        self.device = self.local.device
        self.distributed = _is_distributed(tensor)

    @property
    def local(self) -> Any:
        """This rank's part of the tensor, in the trainer's memory."""
        return _local(self._tensor)

    @property
    def tags(self) -> list[str]:
        """The tags with memory of this rank's part of the tensor; several only for a wrapper."""
        found = (_tag_of(one.data_ptr()) for one in _dense(self.local) if one.numel())
        return list(dict.fromkeys(tag for tag in found if tag is not None))

    @property
    def whole(self) -> Any | None:
        """The whole tensor in the trainer's memory; None if it is not contiguous on this rank."""
        import torch

        local = self.local
        if (
            type(local) is not torch.Tensor
            or local.numel() != math.prod(self.spec.shape)
            or not local.is_contiguous()
            or local.is_conj()
            or local.is_neg()
        ):
            return None
        return local.view(self.spec.shape)

    def can_be_mapped(self, device: Any) -> bool:
        """Return whether an engine's rank on the device can read the tensor without a copy.

        The tensor must be whole on this rank, contiguous, and in a mapped, shareable region.
        """
        whole = self.whole
        return whole is not None and whole.device == device and can_send(whole)

    def view_of(self, memory: Any) -> Any:
        """Return a bucket's bytes as a tensor of this type and shape."""
        view = memory[: self.spec.nbytes].view(self._tensor.dtype)
        return view.view(self.spec.shape)

    def write(self, out: Any) -> None:
        """Copy the tensor. This is a collective call of the ranks that have a part of the tensor.

        The work is queued on the current stream of the bucket's device, but a copy to the host is
        complete on return. Shards of equal size along the first dimension are gathered in place;
        other shards temporarily need additional memory of one or two times the whole tensor's size.

        Args:
            out: see `view_of`.
        """
        if self.part is not None:
            self.part.write(out)
        elif not self.distributed:
            out.copy_(self._tensor, non_blocking=out.is_cuda)
        elif not _gather_in_place(self._tensor, out):
            out.copy_(self._tensor.full_tensor(), non_blocking=out.is_cuda)

    def check(self) -> None:
        """Raise `InvalidStateError` if the tensor's memory is paused and cannot be read."""
        for tag in self.tags:
            if memsaver.state(tag) == "paused":
                raise InvalidStateError(
                    f"{self.spec.name} cannot be sent while tag {tag!r} is paused: resume it first",
                    tag=tag,
                )


def sources_of(state: Any, *, rename: Rename | None = None) -> list[Source]:
    """Return the tensors of a state, in the state's order.

    If a tensor shares the memory of an earlier tensor (tied weights), its spec names the earlier
    tensor.

    Args:
        state: a `torch.nn.Module`, a mapping of names to tensors, or (name, tensor) pairs; a tensor
            may be a `Part`.
        rename: a function that returns the engine's name for a tensor's name, or None to omit the
            tensor.

    Raises:
        ConfigError: a value is not a tensor or cannot be sent, a name is not text that UTF-8 can
            encode, or two tensors have the same name.
    """
    import torch

    sources: list[Source] = []
    names: set[str] = set()
    first: dict[Any, str] = {}  # by memory
    for name, tensor in _pairs(state):
        called = name if rename is None else rename(name)
        if called is None:
            continue
        if not is_encodable(called):
            raise ConfigError(f"a tensor's name must be text that UTF-8 can encode, not {called!r}")
        part = tensor if isinstance(tensor, Part) else None
        tensor = part.tensor if part is not None else tensor
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"{called} must be a tensor, not {type(tensor).__name__}")
        if called in names:
            raise ConfigError(f"two tensors are called {called!r}")
        names.add(called)
        tensor = tensor.detach()
        _check_layout(called, tensor)
        memory, shape, box = _memory_of(tensor), tuple(tensor.shape), None
        if part is not None:
            part.check(called)
            if _is_distributed(tensor):
                raise ConfigError(f"{called}: the part of a tensor must not be a DTensor")
            part = replace(part, tensor=tensor)
            shape, box = tuple(part.shape), part.box
            memory = memory and (memory, shape, box)
        spec = Spec(
            called,
            str(tensor.dtype).removeprefix("torch."),
            shape,
            math.prod(shape) * tensor.element_size(),
            first.get(memory, "") if memory is not None else None,
            box,
        )
        if memory is not None:
            first.setdefault(memory, called)
        sources.append(Source(spec, tensor, part))
    return sources


def state_of(model: Any) -> Any:
    """Return `model.state_dict()`; for a torch module, return only the tensors.

    The state of a module can contain other values (from `get_extra_state`).
    """
    import torch

    state = model.state_dict()
    if not isinstance(model, torch.nn.Module):
        return state
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _pairs(state: Any) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(state, torch.nn.Module):
        state = state_of(state)
    if isinstance(state, Mapping):
        return iter(state.items())
    if isinstance(state, Iterable) and not isinstance(state, str | torch.Tensor):
        return iter(state)
    raise ConfigError(
        "state must be a module, a mapping of names to tensors, or (name, tensor) pairs, not "
        f"{type(state).__name__}"
    )


def _check_layout(name: str, tensor: Any) -> None:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "on no device" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
        raise ConfigError(f"{name} cannot be sent: it is {what}, not a dense tensor")
    if _is_distributed(tensor) and any(place.is_partial() for place in tensor.placements):
        raise ConfigError(f"{name} cannot be sent: it is a partial sum; reduce it first")


def _is_distributed(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _local(tensor: Any) -> Any:
    """Return this rank's part of the tensor."""
    return tensor.to_local() if _is_distributed(tensor) else tensor


def _dense(local: Any) -> list[Any]:
    """Return the dense tensors inside a wrapper, or the tensor itself if it is not a wrapper.

    A wrapper has no memory of its own: its `data_ptr()` is 0.
    """
    return [part.tensor for part in parts_of(local, "")]


def _memory_of(tensor: Any) -> Any:
    """Return a key that is equal for tensors with the same elements in the same memory.

    The key is None if this rank has no element of the tensor. If the memory is unknown, the key
    equals no other key. The key includes the conjugate and negative bits, because these can be the
    only difference between a view and its base.
    """
    local = _local(tensor)
    if local.numel() == 0:
        return None
    dense = [one for one in _dense(local) if one.numel()]
    if not dense or not all(one.data_ptr() for one in dense):
        return object()
    wrapper = () if dense[0] is local else (type(local), local.stride())
    where = (
        wrapper,
        *((one.device, one.data_ptr(), one.stride(), one.is_conj(), one.is_neg()) for one in dense),
    )
    parts = (tensor.device_mesh, tuple(tensor.placements)) if _is_distributed(tensor) else ()
    return where, tuple(tensor.shape), tensor.dtype, parts


def _gather_in_place(tensor: Any, out: Any) -> bool:
    """Gather a tensor into `out` if its layout allows this; otherwise return False on all ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import Shard

    shards = [(at, p) for at, p in enumerate(tensor.placements) if not p.is_replicate()]
    local = tensor.to_local()
    if not shards:
        out.copy_(local, non_blocking=out.is_cuda)
        return True
    (at, place), more = shards[0], shards[1:]
    even = tensor.dim() > 0 and tensor.size(0) % tensor.device_mesh.size(at) == 0
    if more or type(place) is not Shard or place.dim != 0 or not even or out.device != local.device:
        return False
    group = tensor.device_mesh.get_group(at)
    # As bytes, because not every backend supports every type.
    mine = local.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before 2.13
    gather(out.view(-1).view(torch.uint8), mine, group=group)
    return True


def _tag_of(address: int) -> str | None:
    """Return the tag of a memory address; None if the address is in no region."""
    try:
        found = _C.locate(address)
    except NotLoadedError:
        return None
    return found[0] if found is not None else None
