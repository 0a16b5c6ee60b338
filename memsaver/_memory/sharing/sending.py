"""The sender's side: tensors that can be sent, and memory that is kept for their receivers.

Each sent storage has a token. A receiver presents the token, and the exporter then holds the
storage for it. A token is valid as long as its storage exists: because a message is in transit, a
receiver uses it, or the program has it. So a late message fails, and never maps newer memory at the
same place.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from memsaver._memory.sharing import exporter, importing
from memsaver._memory.sharing.uses import Place
from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError, SharingError, TagSharedError, completions

__all__ = [
    "can_send",
    "cancel",
    "cover",
    "is_shareable",
    "make_shareable",
    "reduce",
    "reduce_named",
]


@dataclass
class Sent:
    """A storage that was sent. Messages refer to it by its token."""

    token: int
    pool: tuple[str, int]  # tag and device
    address: int
    nbytes: int
    weak: Any  # torch's weak reference to the storage, whose address is therefore not reused
    storage: Any = None  # keeps the memory, while a message is in transit
    messages: int = 0  # in transit
    until: float = 0.0  # on time.monotonic(); then they are no longer in transit

    def alive(self, torch: Any) -> Any:
        """Return the storage, if it still has the memory that was sent; otherwise None."""
        storage = self.storage
        if storage is None:
            storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        if storage is None or storage.data_ptr() != self.address or storage.nbytes() < self.nbytes:
            return None
        return storage


_shareable: set[str] = set()
_tokens = itertools.count(1)
# Reentrant: a signal handler may send a tensor. No memory is freed under it, because that may wait.
_lock = threading.RLock()
_sent: dict[int, Sent] = {}  # by token
_in_flight: dict[int, Sent] = {}  # those with messages in transit, in the order of their deadlines
_token_of: dict[tuple[int, int, int], int] = {}  # by the storage's address, and its memory
_most_sent = 256  # more entries than this are checked for dead storages


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
    call, it would hide the function that `pickling` registers. In torch's result,
    item 6 is the device, and SGLang changes this item; so `reduce` returns the device there, too.
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
    return importing.rebuild, _arguments(tensor, *_kept(tensor, tag))


def _kept(tensor: Any, tag: str) -> tuple[Place, int]:
    """Keep a tensor's storage for the receiver of a message. See `reduce`.

    Returns:
        The storage's place, and its device here.
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
    """Return the arguments of `rebuild` for a tensor whose storage is at a place."""
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


def can_send(tensor: Any) -> bool:
    """Return whether the tensor's memory is in a mapped, shareable tag, and exportable."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    found = _C.locate(address) if address and _C.owns(address) else None
    if found is None or not is_shareable(found[0]):
        return False
    try:
        return bool(_C.exportable(address, storage.nbytes()))
    except SharingError:
        return False


def reduce_named(
    named: Sequence[tuple[str, Any]], tokens: list[int]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function and its arguments, which create a list of named tensors in a receiver.

    The receiver needs one exchange of messages for up to `wire.MOST_TOKENS` storages of a tag on a
    device.

    Args:
        named: names, and detached tensors for which `can_send` is true.
        tokens: the list to which this function adds the storages' tokens, for `cancel`, even if it
            raises.

    Raises:
        SharingError: see `reduce`; or a tensor is in no region.
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


def _forget_received() -> None:
    """Drop torch's weak references, whose finalizers need modules that an exit removes.

    Storages with messages in transit stay: `multiprocessing` may wait for receivers after this.
    """
    with _lock:
        for key, token in list(_token_of.items()):
            if _sent[token].storage is None:
                del _token_of[key], _sent[token]


def cancel(tokens: list[int]) -> None:
    """Stop keeping storages for a message that no receiver will take. Clears the list."""
    while tokens:
        take(tokens.pop())


def _keep(storage: Any, pool: tuple[str, int], address: int, nbytes: int) -> int:
    """Keep the memory of a storage for the receiver of a message, and return its token."""
    from torch.multiprocessing.reductions import StorageWeakRef

    forget_expired()
    until = time.monotonic() + float(_C.option("importer_seconds"))
    with _lock:
        key = (storage._cdata, address, nbytes)
        token = _token_of.get(key)
        if token is None:
            _prune()
            token = _token_of[key] = next(_tokens)
            if token == 1:
                atexit.register(_forget_received)
            _sent[token] = Sent(token, pool, address, nbytes, StorageWeakRef(storage))
        sent = _sent[token]
        is_first = not _in_flight
        _in_flight.pop(token, None)
        _in_flight[token] = sent
        sent.storage, sent.until = storage, until
        sent.messages += 1
    if is_first:
        exporter.wake()  # so that its thread waits for this deadline
    return token


def _prune() -> None:
    """Remove the entries of storages that no longer exist. Needs the lock."""
    global _most_sent
    if len(_sent) < _most_sent:
        return
    _most_sent = 2 * len(_sent)  # a finalizer that sends a tensor does not begin this again
    for key, token in list(_token_of.items()):
        if _sent[token].weak.expired():
            del _token_of[key], _sent[token]
    _most_sent = max(256, 2 * len(_sent))


def forget_expired(now: float | None = None) -> float | None:
    """Stop keeping memory that no receiver has taken in time.

    Args:
        now: on time.monotonic(), by default the current time.

    Returns:
        The seconds until the next deadline; None if no memory is kept.
    """
    if now is None:
        now = time.monotonic()
    dead = []  # freed after the lock is released
    try:
        with _lock:
            while (sent := _oldest()) is not None:
                if sent.until > now:
                    return sent.until - now
                dead.append(_end(sent))
        return None
    finally:
        dead.clear()


def _oldest() -> Sent | None:
    """Return the entry with the earliest deadline. Needs the lock."""
    while True:
        # `next` raises if a signal handler sends a tensor after the call of `iter`.
        with contextlib.suppress(RuntimeError):
            return next(iter(_in_flight.values()), None)


def _end(sent: Sent) -> Any:
    """Stop keeping a storage for receivers, and return it. Needs the lock."""
    _in_flight.pop(sent.token, None)
    storage, sent.storage, sent.messages = sent.storage, None, 0
    return storage


def find(token: int) -> tuple[Sent, Any]:
    """Return a sent tensor's entry and its storage, which keeps the memory alive.

    Raises:
        SharingError: the tensor was freed.
    """
    # Without the lock: creating the storage may run the program's finalizers, of which one may wait
    # for a tag whose owner sends a tensor.
    sent = _sent.get(token)
    storage = None if sent is None else sent.alive(sys.modules["torch"])
    if sent is None or storage is None:
        raise SharingError(
            "a sent tensor cannot be imported: it was freed; keep the tensor until the other "
            "process has it, and send it again"
        )
    return sent, storage


def take(token: int) -> None:
    """Record that a receiver has one of the messages that refer to a tensor."""
    storage = None
    with _lock:
        sent = _in_flight.get(token)
        if sent is not None:
            sent.messages -= 1
            if sent.messages == 0:
                storage = _end(sent)
    del storage  # may free the memory


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
