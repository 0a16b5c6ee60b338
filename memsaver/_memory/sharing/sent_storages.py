"""The memory that a sender keeps for the receivers of sent tensors.

Each sent storage has a token. When a receiver presents the token, the exporter keeps the storage
for this receiver. A token is valid as long as its storage exists. A message in transit, a receiver
or the program can keep the storage alive. If a message arrives after its storage was freed, the
import fails, and never maps newer memory at the same address.

This module uses no locks, because a lock could deadlock. On the thread that owns the lock, the
garbage collector could run a finalizer that waits for a tag. The tag's owner could in turn wait for
the lock, to send a tensor in a callback. Therefore, each change of state is one method call on a
dict whose keys are integers or tuples of integers. Such a call is atomic, with or without the GIL:
other threads, finalizers and signal handlers can run between two calls, but not during a call.
`list(x)` and `list(x.values())` are also atomic. `list(x.items())` is not atomic, because it
allocates tuples, which can start a garbage collection.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import sys
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memsaver._runtime.native import _C
from memsaver.errors import SharingError

__all__ = [
    "Sent",
    "cancel",
    "claim",
    "find",
    "forget_expired",
    "in_transit",
    "keep",
    "ranges_with",
    "take",
    "unclaim",
]


_Memory = tuple[int, int, int]  # a storage's address, and the address and size of its memory


@dataclass(eq=False)
class Sent:
    """A sent storage. Messages refer to the storage by its token."""

    token: int
    memory: _Memory
    pool: tuple[str, int]  # tag and device
    weak: Any  # torch's weak reference to the storage, whose address is therefore not reused
    # The numbers of its messages that no receiver has claimed. An expired message stays here until
    # the storage's last message expires, because its receiver may be late and must not take a later
    # message.
    untaken: dict[int, bool] = field(default_factory=dict)

    @property
    def address(self) -> int:
        """The address of the storage's memory."""
        return self.memory[1]

    @property
    def nbytes(self) -> int:
        """The size of the storage's memory, in bytes."""
        return self.memory[2]

    def alive(self, torch: Any) -> Any:
        """Return the storage if it still has the memory that was sent, otherwise None."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.weak.cdata)
        if storage is None or storage.data_ptr() != self.address or storage.nbytes() < self.nbytes:
            return None
        return storage


class _Message(NamedTuple):
    """A message in transit."""

    sent: Sent
    storage: Any  # keeps the memory
    until: float  # the transit's deadline, on the time.monotonic() clock


_tokens = itertools.count(1)
_numbers = itertools.count(1)
_sent: dict[int, Sent] = {}  # by token
_sent_of: dict[_Memory, Sent] = {}
_in_flight: dict[int, _Message] = {}  # by number, in the order of their deadlines
_most_sent = 256  # above this number of entries, dead storages are removed


def _forget_received() -> None:
    """Delete torch's weak references, because their finalizers need modules that are removed at
    exit.

    Storages with messages in transit are not affected, because `multiprocessing` may wait for their
    receivers afterwards.
    """
    for sent in list(_sent_of.values()):
        if not sent.untaken:
            _forget(sent)


def _forget(sent: Sent) -> None:
    _sent.pop(sent.token, None)
    _sent_of.pop(sent.memory, None)  # last: if this is interrupted, a later call finds the entry


def cancel(tokens: list[int]) -> None:
    """Stop keeping storages for a message that no receiver will receive, and clear the list."""
    while tokens:
        sent = _sent.get(tokens.pop())
        if sent is not None:
            take(claim(sent))


def keep(storage: Any, pool: tuple[str, int], address: int, nbytes: int) -> int:
    """Keep a storage's memory for a message's receiver, and return the storage's token.

    The caller must call `exporter.expect_deadline` afterwards.
    """
    from torch.multiprocessing.reductions import StorageWeakRef

    forget_expired()
    memory = (storage._cdata, address, nbytes)
    sent = _sent_of.get(memory)
    if sent is None:
        _prune()
        token = next(_tokens)
        if token == 1:
            atexit.register(_forget_received)
        # If another thread has added an entry first, use that entry; the new token stays unused.
        sent = _sent_of.setdefault(memory, Sent(token, memory, pool, StorageWeakRef(storage)))
    number = next(_numbers)
    until = time.monotonic() + float(_C.option("importer_seconds"))
    _in_flight[number] = _Message(sent, storage, until)
    sent.untaken[number] = True
    _sent[sent.token] = sent
    return sent.token


def _prune() -> None:
    """Remove the entries of storages that no longer exist."""
    global _most_sent
    if len(_sent_of) < _most_sent:
        return
    _most_sent = 2 * len(_sent_of)  # so that a finalizer that sends a tensor does not prune
    for sent in list(_sent_of.values()):
        if sent.weak.expired():
            _forget(sent)
    _most_sent = max(256, 2 * len(_sent_of))


def forget_expired(now: float | None = None) -> float | None:
    """Stop keeping memory whose message was not received before its deadline.

    Args:
        now: a `time.monotonic` time, by default the current time.

    Returns:
        The number of seconds until the next deadline, or None if no memory is kept.
    """
    if now is None:
        now = time.monotonic()
    while (number := _oldest()) is not None:
        # No variable may refer to a message: its removal by another thread must free the memory.
        try:
            sent, until = _in_flight[number].sent, _in_flight[number].until
        except KeyError:
            continue
        if until > now:
            return until - now
        _forget_expired_of(sent, number)
        _in_flight.pop(number, None)  # may free the memory
    return None


def _forget_expired_of(sent: Sent, number: int) -> None:
    """Remove a storage's unclaimed messages if this expired message is the last of them."""
    untaken = list(sent.untaken)
    if not any(other > number for other in untaken):
        for other in untaken:
            sent.untaken.pop(other, None)


def _oldest() -> int | None:
    """Return the number of the message with the earliest deadline."""
    while True:
        # `next` raises if a message was added or removed after the call to `iter`.
        with contextlib.suppress(RuntimeError):
            return next(iter(_in_flight), None)


def find(token: int) -> tuple[Sent, Any]:
    """Return a sent tensor's entry, and its storage, which keeps the memory alive.

    Raises:
        SharingError: the tensor was freed.
    """
    sent = _sent.get(token)
    storage = None if sent is None else sent.alive(sys.modules["torch"])
    if sent is None or storage is None:
        raise SharingError(
            "a sent tensor cannot be imported: it was freed; keep the tensor until the other "
            "process has it, and send it again"
        )
    return sent, storage


def claim(sent: Sent) -> int | None:
    """Claim a storage's earliest unclaimed message for one receiver, and return its number.

    Claim a message before answering the receiver, and call `take` after the answer. As soon as the
    receiver has the answer, the program may continue and send the storage again, to another
    receiver.

    Returns:
        The number, or None if the storage has no unclaimed message, because the receiver received
        the same message more than once.
    """
    for number in sorted(list(sent.untaken)):
        if sent.untaken.pop(number, False):
            return number
    return None


def take(number: int | None) -> None:
    """Record that a receiver has received the message whose number `claim` returned."""
    if number is not None:
        _in_flight.pop(number, None)  # may free the memory


def unclaim(sent: Sent, number: int | None) -> None:
    """Undo `claim`, so that the receiver can receive the message in a later attempt."""
    if number is not None:
        sent.untaken[number] = True
        if number not in _in_flight:
            _forget_expired_of(sent, number)


def ranges_with(tag: str, device: int) -> list[tuple[int, int]]:
    """Return the address and size of each tensor in transit that belongs to a tag on a device."""
    return [(sent.address, sent.nbytes) for sent in in_transit() if sent.pool == (tag, device)]


def in_transit() -> set[Sent]:
    """Return the storages of all messages in transit."""
    found = set()
    for number in list(_in_flight):
        with contextlib.suppress(KeyError):
            found.add(_in_flight[number].sent)  # no variable may refer to the message
    return found
