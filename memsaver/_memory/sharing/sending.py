"""The sender's side: tensors that can be sent, and memory that is kept for their receivers."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from memsaver._memory.sharing import exporter, importing
from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError, SharingError, TagSharedError, completions

__all__ = ["cover", "is_shareable", "make_shareable", "reduce"]


@dataclass
class Sent:
    """The memory of a tensor that was sent and that no receiver has taken yet."""

    token: int
    storage: Any  # keeps the memory
    pool: tuple[str, int]  # tag and device
    address: int
    nbytes: int
    until: float  # on time.monotonic()


_shareable: set[str] = set()
_tokens = itertools.count(1)
# In the order of their deadlines. Changed without a lock: each operation is atomic under the GIL.
_in_flight: dict[int, Sent] = {}
_token_of: dict[tuple[int, int], int] = {}  # by the storage's and its memory's address


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
    """Let torch's own reduction send tensors of shareable tags too, if there are any.

    SGLang replaces torch's reduction, and then registers its own, which calls torch's. Without this
    call, it would hide the function that `pickling` registers. SGLang changes item 6 of the result,
    which is the device in torch's, so `reduce` also returns the device there.
    """
    if not _shareable:
        return
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    if reductions is None or getattr(reductions.reduce_tensor, "is_memsavers", False):
        return
    original = reductions.reduce_tensor

    @functools.wraps(original)
    def reduce_tensor(tensor: Any) -> Any:
        from memsaver._memory.pickling import sent

        return sent(tensor, original)

    reduce_tensor.is_memsavers = True  # type: ignore[attr-defined]
    reductions.reduce_tensor = reduce_tensor


def reduce(tensor: Any, tag: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and its arguments, which make a tensor in the same memory elsewhere.

    Waits for the work of the current stream, whose results the receiver may read at once.

    Raises:
        SharingError: the tag is paused, the memory is not exportable, or the tensor has an autograd
            history.
    """
    if tensor.requires_grad and not tensor.is_leaf:
        raise SharingError(
            f"a tensor of tag {tag!r} that has an autograd history cannot be sent to another "
            "process: send tensor.detach()",
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
    token = _keep(storage, (tag, device), address, nbytes)
    place = importing.Place(
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
    return importing.rebuild, (
        type(tensor),
        tensor.dtype,
        tuple(tensor.size()),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        tensor.requires_grad,
        device,
        tuple(place),
    )


def _keep(storage: Any, pool: tuple[str, int], address: int, nbytes: int) -> int:
    """Keep the memory of a storage for a receiver, and return its token."""
    forget_expired()
    until = time.monotonic() + float(_C.option("importer_seconds"))
    known = _token_of.get((storage._cdata, address))
    sent = _in_flight.pop(known, None) if known is not None else None
    token = sent.token if sent is not None else next(_tokens)
    is_first = not _in_flight
    _in_flight[token] = Sent(token, storage, pool, address, nbytes, until)
    _token_of[storage._cdata, address] = token
    if is_first:
        exporter.wake()  # so that its thread waits for this deadline
    return token


def forget_expired() -> float | None:
    """Stop keeping memory that no receiver has taken in time.

    Returns:
        The seconds until the next deadline; None if no memory is kept.
    """
    now = time.monotonic()
    while _in_flight:
        try:
            first = next(iter(_in_flight.values()))
        except (RuntimeError, StopIteration):  # another thread changed it
            continue
        if first.until > now:
            return first.until - now
        take(first.token)
    return None


def take(token: int) -> Sent | None:
    """Return the memory of a sent tensor, which the caller keeps for its receiver from now on."""
    sent = _in_flight.pop(token, None)
    if sent is not None:
        _token_of.pop((sent.storage._cdata, sent.address), None)
    return sent


def kept() -> int:
    """Return the number of tensors that are kept for receivers, in transit or in use."""
    return len(_in_flight) + exporter.held()


def ranges_with(tag: str, device: int) -> list[tuple[int, int]]:
    """Return address and bytes of each tensor in transit that a tag has on a device."""
    return [
        (sent.address, sent.nbytes)
        for sent in list(_in_flight.values())
        if sent.pool == (tag, device)
    ]


def _add_importers(error: MemsaverError) -> None:
    """Add the processes that use a tag's tensors to a TagSharedError."""
    if isinstance(error, TagSharedError):
        try:
            rows = _C.importers()
        except Exception:
            return  # the error itself is more important
        error.importers = tuple((pid, nbytes) for tag, pid, nbytes in rows if tag == error.tag)


completions.append(_add_importers)
