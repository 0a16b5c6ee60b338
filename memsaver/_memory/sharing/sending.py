"""The sender's side, which decides whether a tensor can be sent, and reduces the tensor."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from memsaver._memory.sharing import exporter, importing, sent_storages
from memsaver._memory.sharing.uses import Place
from memsaver._runtime.native import _C, STATES, State
from memsaver.errors import (
    ConfigError,
    InvalidStateError,
    MemsaverError,
    SharingError,
    TagSharedError,
    completions,
)

__all__ = [
    "can_send",
    "cover",
    "is_shareable",
    "kept",
    "located",
    "make_shareable",
    "reduce",
    "reduce_any",
    "reduce_named",
    "settled",
]


_shareable: set[str] = set()


def make_shareable(tag: str) -> None:
    """Make the tag's new memory exportable. Idempotent."""
    _C.tag_make_shareable(tag)
    _shareable.add(tag)
    if "torch" in sys.modules:
        cover(sys.modules["torch"])


def is_shareable(tag: str) -> bool:
    """Return whether tensors of the tag can be sent."""
    return tag in _shareable


def cover(torch: Any) -> None:
    """Make torch's own reduction function also send tensors of shareable tags, if any exist.

    SGLang registers its own reduction function, which calls torch's function. Without this call,
    SGLang's function would hide the function that `pickling` registers. SGLang changes item 6 of
    torch's result, which is the device. Therefore, `reduce` also returns the device as item 6.
    """
    if not _shareable:
        return
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is None or getattr(reductions.reduce_tensor, "is_memsavers", False):
        return
    original = reductions.reduce_tensor

    @functools.wraps(original)
    def reduce_tensor(tensor: Any) -> Any:
        return reduce_any(tensor, original)

    reduce_tensor.is_memsavers = True  # type: ignore[attr-defined]
    reductions.reduce_tensor = reduce_tensor


def reduce_any(tensor: Any, otherwise: Callable[[Any], Any]) -> Any:
    """Reduce a tensor for another process, without a copy if the tensor's region is shareable.

    Args:
        tensor: any tensor.
        otherwise: a function that reduces tensors that are in no region.

    Raises:
        ConfigError: the tensor's region is not shareable.
        SharingError: the memory belongs to another process. See also `reduce`.
    """
    parts = _parts(tensor)
    found = next((one for one in map(located, parts) if one is not None), None)
    if found is None:
        if any(importing.is_imported(_address(part)) for part in parts):
            raise SharingError(
                "a tensor that another process sent cannot be forwarded: send a copy, "
                "tensor.clone(), or let the process that created it send it"
            )
        return otherwise(tensor)
    tag, state = found
    if is_shareable(tag):
        # torch reduces parts of sparse and nested tensors with the function that `cover` installs.
        is_plain = parts[0] is tensor and not tensor.is_nested
        return reduce(tensor, tag) if is_plain else otherwise(tensor)
    first = "" if state == "mapped" else f"after memsaver.resume({tag!r}) "
    raise ConfigError(
        f"a tensor of tag {tag!r} cannot be sent to another process: its memory can be paused, and "
        f"CUDA IPC has no handle for such memory; create it with memsaver.region({tag!r}, "
        f"shareable=True), or {first}send a copy: " + _copy(),
        tag=tag,
    )


def _copy() -> str:
    if _C.driver_info()[2]:
        return "tensor.clone() (on the simulated driver tensor.cpu() is the tensor itself)"
    return (
        "tensor.cpu(), or on the GPU tensor.clone() under memsaver.disabled(), or create the "
        "tensor under memsaver.disabled()"
    )


def reduce(tensor: Any, tag: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and its arguments; in a receiver, the call creates a tensor in the same
    memory.

    This function waits for the work on the current stream, because the receiver may read the
    results at once.

    Raises:
        InvalidStateError: waiting for a transition of the tag would deadlock.
        SharingError: the tag is paused, the memory is not exportable, or the tensor has an autograd
            history or is a conjugated or negated view.
    """
    return importing.rebuild, _arguments(tensor, *_kept(tensor, tag))


def _kept(tensor: Any, tag: str) -> tuple[Place, int]:
    """Keep a tensor's storage for the receiver of a message. See `reduce`.

    Returns:
        The storage's place, and the index of its device in this process.
    """
    if tensor.requires_grad and not tensor.is_leaf:
        raise SharingError(
            f"a tensor of tag {tag!r} that has an autograd history cannot be sent to another "
            "process: send tensor.detach()",
            tag=tag,
        )
    if tensor.is_conj() or tensor.is_neg():
        raise SharingError(
            f"a conjugated or negated view of a tensor of tag {tag!r} cannot be sent to another "
            "process: send tensor.resolve_conj().resolve_neg()",
            tag=tag,
        )
    storage = tensor.untyped_storage()
    address, nbytes = storage.data_ptr(), storage.nbytes()
    extents = _C.exportable(address, nbytes)
    if not extents:
        raise SharingError(f"a tensor of tag {tag!r} cannot be sent: it has no memory", tag=tag)
    torch = sys.modules["torch"]
    if tensor.is_cuda:
        stream = torch.cuda.current_stream(tensor.device)
        if not stream.query():
            stream.synchronize()
    _, _, span_address, span_bytes, _, device, _ = extents[0]
    endpoint = exporter.endpoint()
    token = sent_storages.keep(storage, (tag, device), address, nbytes)
    exporter.expect_deadline()
    place = Place(
        endpoint=endpoint,
        token=token,
        tag=tag,
        span_address=span_address,
        span_bytes=span_bytes,
        address=address,
        nbytes=nbytes,
        ids=tuple(row[4] for row in extents),
        device=importing.name_of(device),
    )
    return place, device


def _arguments(tensor: Any, place: Place, device: int) -> tuple[Any, ...]:
    """Return the arguments of `rebuild` for a tensor whose storage is at this place."""
    return (
        type(tensor),
        tensor.dtype,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        tensor.requires_grad,
        device,
        tuple(place),
    )


def located(tensor: Any) -> tuple[str, State] | None:
    """Return the tag of a tensor's memory and the tag's state, or None for memory without a tag."""
    address = _address(tensor)
    if not address or not _C.owns(address):
        return None
    found = _C.locate(address)
    return None if found is None else (found[0], STATES[found[2]])


def settled(tensor: Any) -> tuple[str, State] | None:
    """Wait until no transition of the tensor's tag is in progress, and return `located(tensor)`.

    Does not wait if the wait would deadlock.
    """
    found = located(tensor)
    while found is not None and found[1] in ("saving", "restoring"):
        try:
            _C.exportable(_address(tensor), 1)  # the call waits, whether or not it fails
        except SharingError:
            pass
        except InvalidStateError:
            return found
        found = located(tensor)
    return found


def _address(tensor: Any) -> int:
    """Return the address of a tensor's memory, or 0 if the tensor has no memory of its own."""
    with _C.SignalsDeferred():  # so that a handler's exception is not mistaken for torch's
        try:
            return int(tensor.untyped_storage().data_ptr())
        except Exception:
            return 0  # sparse, on the meta device, or a subclass


def _parts(tensor: Any) -> list[Any]:
    """Return a sparse tensor's index and value tensors, or a list of only the given tensor."""
    torch = sys.modules["torch"]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def can_send(tensor: Any) -> bool:
    """Return whether the tensor's memory is exportable and belongs to a mapped, shareable tag."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    found = _C.locate(address) if address and _C.owns(address) else None
    if found is None or not is_shareable(found[0]) or STATES[found[2]] != "mapped":
        return False
    try:
        return bool(_C.exportable(address, storage.nbytes()))
    except SharingError:
        return False


def reduce_named(
    named: Sequence[tuple[str, Any]], tokens: list[int]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and its arguments; in the receiver, the call creates a list of named
    tensors.

    For each tag and device, the receiver needs one message round trip for up to `wire.MOST_TOKENS`
    storages.

    Args:
        named: names, and detached tensors for which `can_send` is true.
        tokens: a list to which this function adds the storages' tokens, even if it raises. Pass the
            list to `sent_storages.cancel` if the message is not sent.

    Raises:
        SharingError: a tensor is in no region. See also `reduce`.
    """
    rows = []
    places: dict[int, tuple[Place, int]] = {}  # by storage, so that each is kept only once
    for name, tensor in named:
        storage = tensor.untyped_storage()
        if storage._cdata not in places:
            found = _C.locate(storage.data_ptr())
            if found is None:
                raise SharingError(f"{name} cannot be sent without a copy: it is in no region")
            places[storage._cdata] = _kept(tensor, found[0])
            tokens.append(places[storage._cdata][0].token)
        rows.append((name, _arguments(tensor, *places[storage._cdata])))
    return importing.rebuild_named, (rows,)


def kept() -> int:
    """Return the number of tensors that are kept for receivers, in transit or in use."""
    return len(sent_storages.in_transit()) + exporter.held()


def _add_importers(error: MemsaverError) -> None:
    """Add the processes that use a tag's tensors to a TagSharedError."""
    if isinstance(error, TagSharedError):
        with _C.SignalsDeferred():
            try:
                rows = _C.importers()
            except Exception:
                return  # the original error matters more
        # The core truncates a long tag in an error to at most 127 bytes, at a character boundary.
        is_cut = len(error.tag.encode()) > 127 - 4
        error.importers = tuple(
            (pid, nbytes)
            for tag, pid, nbytes in rows
            if tag == error.tag or (is_cut and tag.startswith(error.tag))
        )


completions.append(_add_importers)
