"""The receiver's connections: one to each process that sent it tensors, with the memory mapped.

One thread for each connection sends and receives all messages, maps and unmaps. Other threads add
jobs to its queue, and take no lock, because a finalizer may run in the middle of another call of
the same thread.

An extent is in use as soon as its `users` contain a key. A thread first adds its key, then checks
that the extent is not being unmapped; the connection's thread first marks the extent, then checks
that it has no users. Each sees the other's step, because Python runs one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from memsaver._memory.sharing import wire
from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError, SharingError

if TYPE_CHECKING:
    from memsaver._memory.sharing.importing import Place

__all__ = ["Peer", "is_foreign", "peer_at"]

_ANSWER_SECONDS = 60.0  # the longest wait for an exporter, which may be resuming the tag
_GATHER_SECONDS = 0.003
_LOOK_SECONDS = 1.0  # between checks that the connection's thread still runs
_MOST_TOKENS = 2000  # in a message


class Extent:
    """A mapped extent of another process."""

    __slots__ = ("closing", "id", "offset", "span", "users", "wanted")

    def __init__(self, span: Span, offset: int, number: int) -> None:
        self.span, self.offset, self.id = span, offset, number
        self.users: set[Hashable] = set()
        self.closing = False  # it is being unmapped
        self.wanted = False  # it is released when its last user ends


class Span:
    """The addresses in this process for one span of another process."""

    def __init__(self, ordinal: int, nbytes: int) -> None:
        self.native = _C.ForeignSpan(ordinal, nbytes)
        self.nbytes = nbytes
        self.at: dict[int, Extent] = {}  # by offset


class _Request:
    """A request to import one tensor's extents. The connection's thread completes it."""

    def __init__(self, place: Place, ordinal: int) -> None:
        self.place, self.ordinal = place, ordinal
        self.over = threading.Event()
        self.error: BaseException | None = None


class Peer:
    """The connection to one process that exports memory."""

    def __init__(self, endpoint: str, tag: str) -> None:
        self.endpoint = endpoint
        self.extents: dict[int, Extent] = {}  # by id
        self.spans: dict[tuple[int, int], Span] = {}  # by address there, and device here
        self._jobs: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._is_woken = False  # the thread will look at the queue
        self._is_urgent = False  # it will do so without a delay
        self._is_connected = True
        self._has_ended = False  # whether the connection's thread has ended
        self._was_requested = False  # whether a release was requested during an import
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(f"\0{endpoint}")
            wire.peer_of(self._socket)
            threading.Thread(target=self._run, name="memsaver-import", daemon=True).start()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _gone(tag) from error
            raise

    def close(self) -> None:
        """Close the connection. Its memory stays mapped."""
        self._has_ended = True
        self._socket.close()
        os.close(self._wake)

    # --- any thread

    def use(self, place: Place, ordinal: int, key: Hashable) -> tuple[list[Extent], int]:
        """Map the memory of a sent tensor, and keep it mapped until `end_use`.

        Returns:
            The extents, and the tensor's address in this process.

        Raises:
            SharingError: see `importing.rebuild`.
        """
        for _ in range(3):
            extents = self._used(place, key)
            if extents is not None:
                self._add("take", place.token)
                span = extents[0].span
                return extents, span.native.address + place.address - place.span_address
            request = _Request(place, ordinal)
            self._add("import", request)
            self._await(request)
            if request.error is not None:
                raise request.error
        raise SharingError(
            f"a tensor of tag {place.tag!r} cannot be imported: its memory was released again "
            "before it could be used; send it again",
            tag=place.tag,
        )

    def _await(self, request: _Request) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not request.over.wait(_LOOK_SECONDS):
            if self._has_ended and not request.over.is_set():
                raise _gone(request.place.tag)
            if time.monotonic() > deadline:
                raise SharingError(
                    f"a tensor of tag {request.place.tag!r} cannot be imported: its process did "
                    f"not answer within {_ANSWER_SECONDS:.0f} s",
                    tag=request.place.tag,
                )

    def end_use(self, token: int, key: Hashable, extents: list[Extent]) -> None:
        """Stop using the memory of a tensor, so that it can be unmapped. Finalizers may call it."""
        for extent in extents:
            extent.users.discard(key)
        self._add("drop", (token, extents))

    def _used(self, place: Place, key: Hashable) -> list[Extent] | None:
        found = [self.extents.get(number) for number in place.ids]
        extents = [extent for extent in found if extent is not None]
        for extent in extents:
            extent.users.add(key)
        if len(extents) == len(found) and not any(extent.closing for extent in extents):
            return extents
        for extent in extents:
            extent.users.discard(key)
        return None

    def _add(self, kind: str, value: Any) -> None:
        self._jobs.put((kind, value))
        is_urgent = kind == "import"
        if is_urgent:
            self._is_urgent = True
        if (is_urgent or not self._is_woken) and not self._has_ended:
            self._is_woken = True
            os.eventfd_write(self._wake, 1)

    # --- the connection's thread

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._socket, select.POLLIN)
        while True:
            for file, _ in poll.poll():
                if file != self._wake:
                    if not self._hear():
                        poll.unregister(self._socket)
                    continue
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                if not self._is_urgent:  # wait for more jobs, to do them together
                    select.select([self._wake], [], [], _GATHER_SECONDS)
                self._is_urgent = self._is_woken = False
                self._work()
            if not self._is_connected and not self.extents:
                _peers.pop(self.endpoint, None)
                self.close()
                return

    def _work(self) -> None:
        takes: list[int] = []
        drops: list[int] = []
        ended: list[Extent] = []
        while True:
            try:
                kind, value = self._jobs.get_nowait()
            except queue.Empty:
                break
            if kind == "import":
                self._tell(takes, drops)
                self._import(value)
            elif kind == "take":
                takes.append(value)
            else:
                drops.append(value[0])
                ended += value[1]
        self._tell(takes, drops)
        self._release([extent for extent in ended if extent.wanted or not self._is_connected])

    def _tell(self, takes: list[int], drops: list[int]) -> None:
        for name, tokens in (("take", takes), ("drop", drops)):
            for at in range(0, len(tokens), _MOST_TOKENS):
                self._send({name: tokens[at : at + _MOST_TOKENS]})
            tokens.clear()

    def _send(self, message: wire.Message) -> None:
        with contextlib.suppress(OSError):  # the process has ended: `_hear` notices it
            wire.send(self._socket, message)

    def _hear(self) -> bool:
        """Receive a message outside an import. Returns whether the other process exists."""
        try:
            message, files = wire.receive(self._socket)
        except (OSError, ValueError, SharingError):
            message, files = {}, []
        for file in files:
            os.close(file)
        if message:
            self._note(message)
            return True
        self._is_connected = False
        self._release(list(self.extents.values()))
        return False

    def _note(self, message: wire.Message) -> None:
        if "release" in message:
            self._was_requested = True
            for extent in list(self.extents.values()):
                extent.wanted = True
            self._release(list(self.extents.values()))

    def _release(self, extents: list[Extent]) -> None:
        """Unmap those extents that no tensor uses, and report them as released."""
        by_span: dict[Span, list[Extent]] = {}
        for extent in dict.fromkeys(extents):
            extent.closing = True
            if extent.users or self.extents.get(extent.id) is not extent:
                extent.closing = bool(self.extents.get(extent.id) is not extent)
            else:
                by_span.setdefault(extent.span, []).append(extent)
        released = []
        for span, gone in by_span.items():
            try:
                span.native.unmap([extent.offset for extent in gone])
            except MemsaverError:  # the driver refused: they stay mapped until the next request
                for extent in gone:
                    extent.closing = False
                continue
            for extent in gone:
                del self.extents[extent.id], span.at[extent.offset]
                released.append(extent.id)
        for at in range(0, len(released), _MOST_TOKENS):
            self._send({"released": released[at : at + _MOST_TOKENS]})

    def _import(self, request: _Request) -> None:
        place = request.place
        try:
            if any(number not in self.extents for number in place.ids):
                self._was_requested = False
                wire.send(self._socket, {"import": [[place.address, place.nbytes]]})
                while self._take_extents(place, request.ordinal):
                    pass
                if any(number not in self.extents for number in place.ids):
                    raise SharingError(
                        f"a tensor of tag {place.tag!r} cannot be imported: its memory was freed "
                        "or replaced after it was sent; keep the tensor until the other process "
                        "has it, and send it again",
                        tag=place.tag,
                    )
        except MemsaverError as error:
            request.error = error
        except OSError as error:
            request.error = _gone(place.tag)
            request.error.__cause__ = error
        except Exception as error:
            request.error = SharingError(
                f"a tensor of tag {place.tag!r} cannot be imported: {error}", tag=place.tag
            )
        finally:
            request.over.set()

    def _take_extents(self, place: Place, ordinal: int) -> bool:
        """Receive a message of an import, and map its extents. Returns whether another follows.

        If its extents cannot be mapped, they are reported as released, and the remaining messages
        are still received.
        """
        message, files = wire.receive(self._socket)
        try:
            if not message:
                raise _gone(place.tag)
            if "error" in message:
                raise SharingError(str(message["error"]), tag=str(message["tag"]))
            if "extents" not in message:
                self._note(message)
                return True
            try:
                self._map(ordinal, message["extents"], files)
            except BaseException:
                if message["more"]:
                    with contextlib.suppress(MemsaverError):
                        while self._take_extents(place, ordinal):
                            pass
                raise
            return bool(message["more"])
        finally:
            for file in files:
                os.close(file)

    def _map(self, ordinal: int, rows: list[list[int]], files: list[int]) -> None:
        """Map the extents of one message, and report those that cannot be mapped as released."""
        by_span: dict[tuple[int, int], list[tuple[list[int], int]]] = {}
        for row, file in zip(rows, files, strict=True):
            by_span.setdefault((row[2], row[3]), []).append((row, file))
        refused = [row[4] for row in rows]
        try:
            for (address, nbytes), pieces in by_span.items():
                span = self.spans.get((address, ordinal))
                if span is None:
                    span = self.spans[address, ordinal] = Span(ordinal, nbytes)
                places = [(row[0] - address, row[1], file) for row, file in pieces]
                self._make_room(span, places)
                span.native.map(places)
                for row, _ in pieces:
                    extent = Extent(span, row[0] - address, row[4])
                    extent.wanted = self._was_requested
                    span.at[extent.offset] = self.extents[extent.id] = extent
                    refused.remove(extent.id)
        finally:
            if refused:
                self._send({"released": refused})

    def _make_room(self, span: Span, places: list[tuple[int, int, int]]) -> None:
        """Unmap earlier extents that overlap new ones; their memory was freed."""
        old = [
            extent
            for extent in span.at.values()
            if any(at <= extent.offset < at + nbytes for at, nbytes, _ in places)
        ]
        if old:
            self._release(old)


def _gone(tag: str) -> SharingError:
    return SharingError(
        f"a tensor of tag {tag!r} cannot be imported: the process that sent it has ended, or is on "
        "another machine or in another network namespace",
        tag=tag,
    )


def peer_at(endpoint: str, tag: str) -> Peer:
    """Return the connection to the process at an endpoint, made if necessary.

    Raises:
        SharingError: the process has ended, or belongs to another user.
    """
    peer = _peers.get(endpoint)
    if peer is None:
        fresh = Peer(endpoint, tag)
        peer = _peers.setdefault(endpoint, fresh)
        if peer is not fresh:  # another thread was faster
            fresh._send({"bye": True})
    return peer


def is_foreign(address: int) -> bool:
    """Return whether an address lies in memory of another process."""
    return any(
        span.native.address <= address < span.native.address + span.nbytes
        for peer in list(_peers.values())
        for span in list(peer.spans.values())
    )


_peers: dict[str, Peer] = {}


def _forget() -> None:
    """Close the parent's sockets in a forked child, so that exporters notice the parent's end."""
    for peer in _peers.values():
        peer.close()
    _peers.clear()


os.register_at_fork(after_in_child=_forget)
