"""The receiver's connections: one to each process that sent it tensors, with the memory mapped.

One thread for each connection sends and receives all messages, maps and unmaps, and is the only one
that changes extents. Other threads add jobs to its queue, and take no lock, because a finalizer may
run in the middle of another call of the same thread.

Each use of a sent tensor begins with a question to its process, which holds the memory until the
use has ended here, on the devices too.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING

from memsaver._memory.sharing import wire
from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError, SharingError

if TYPE_CHECKING:
    from memsaver._memory.sharing.importing import Place

__all__ = ["Peer", "Use", "is_foreign", "peer_at"]

_ANSWER_SECONDS = 60.0  # the longest wait for an exporter, which may be resuming the tag
_GATHER_MILLISECONDS = 3
_LOOK_SECONDS = 1.0  # between checks that the connection's thread still runs
_MOST_TOKENS = 2000  # in a message


class Extent:
    """A mapped extent of another process."""

    __slots__ = ("id", "nbytes", "offset", "span", "users", "wanted")

    def __init__(self, span: Span, offset: int, nbytes: int, number: int) -> None:
        self.span, self.offset, self.nbytes, self.id = span, offset, nbytes, number
        self.users = 0  # uses that have begun
        self.wanted = False  # it is released when its last user ends


class Span:
    """The addresses in this process for one span of another process."""

    def __init__(self, ordinal: int, nbytes: int) -> None:
        self.native = _C.ForeignSpan(ordinal, nbytes)
        self.nbytes = nbytes
        self.at: dict[int, Extent] = {}  # by offset


class Use:
    """A use of a sent tensor's memory. The connection's thread begins and ends it."""

    def __init__(self, place: Place, ordinal: int) -> None:
        self.place, self.ordinal = place, ordinal
        self.extents: list[Extent] = []  # counted as used, while the use has begun
        self.is_held = False  # the other process holds the memory for this use
        self.is_decided = threading.Event()  # it has begun, or there is an error
        self.error: BaseException | None = None


class Peer:
    """The connection to one process that exports memory."""

    def __init__(self, endpoint: str, tag: str) -> None:
        self.endpoint = endpoint
        self.extents: dict[int, Extent] = {}  # by id
        self.spans: dict[tuple[int, int], Span] = {}  # by address there, and device here
        self._jobs: queue.SimpleQueue[tuple[bool, Use]] = queue.SimpleQueue()  # begins, or ends
        self._is_woken = False  # the thread will look at the queue
        self._is_urgent = False  # it will do so without a delay
        self._is_connected = True
        self._has_ended = False  # whether the connection's thread has ended
        self._is_importing = False
        self._was_requested = False  # whether a release was requested during an import
        # Closed with this object, and not earlier: any thread may write to it.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake).atexit = False
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

    # --- any thread

    def begin(self, use: Use) -> int:
        """Map the memory of a sent tensor, and keep it mapped until `end`, which must follow.

        Returns:
            The tensor's address in this process.

        Raises:
            SharingError: see `importing.rebuild`.
        """
        self._add(True, use)
        deadline = time.monotonic() + _ANSWER_SECONDS
        place = use.place
        while not use.is_decided.wait(_LOOK_SECONDS):
            if self._has_ended and not use.is_decided.is_set():
                raise _gone(place.tag)
            if time.monotonic() > deadline:
                raise SharingError(
                    f"a tensor of tag {place.tag!r} cannot be imported: its process did not answer "
                    f"within {_ANSWER_SECONDS:.0f} s",
                    tag=place.tag,
                )
        if use.error is not None:
            raise use.error
        return use.extents[0].span.native.address + place.address - place.span_address

    def end(self, use: Use) -> None:
        """End a use, also one that failed or was interrupted. Finalizers may call it."""
        self._add(False, use)

    def _add(self, begins: bool, use: Use) -> None:
        self._jobs.put((begins, use))
        if begins:
            self._is_urgent = True
        if (begins or not self._is_woken) and not self._has_ended:
            self._is_woken = True
            os.eventfd_write(self._wake, 1)

    # --- the connection's thread

    def _run(self) -> None:
        events, jobs = select.poll(), select.poll()
        events.register(self._socket, select.POLLIN)
        for poll in (events, jobs):
            poll.register(self._wake, select.POLLIN)
        try:
            while self._is_connected or self.extents:
                for file, _ in events.poll():
                    if file != self._wake:
                        if not self._hear():
                            events.unregister(self._socket)
                        continue
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    if not self._is_urgent:  # wait for more jobs, to do them together
                        jobs.poll(_GATHER_MILLISECONDS)
                    self._is_urgent = self._is_woken = False
                    self._work()
        finally:
            if _peers.get(self.endpoint) is self:
                del _peers[self.endpoint]
            self.close()

    def _work(self) -> None:
        ended: list[Use] = []
        while True:
            try:
                begins, use = self._jobs.get_nowait()
            except queue.Empty:
                break
            if begins:
                self._begin(use)
            else:
                ended.append(use)
        self._end([use for use in ended if use.extents])

    def _end(self, uses: list[Use]) -> None:
        extents = [extent for use in uses for extent in use.extents]
        for extent in extents:
            extent.users -= 1
        if uses and self._is_connected:
            # The other process may reuse the memory as soon as it knows.
            with contextlib.suppress(MemsaverError):  # a lost context: no work uses the memory
                extents[0].span.native.drain()
            self._tell("drop", [use.place.token for use in uses])
        for use in uses:
            use.extents = []
        self._release([extent for extent in extents if extent.wanted or not self._is_connected])

    def _tell(self, name: str, numbers: list[int]) -> None:
        for at in range(0, len(numbers), _MOST_TOKENS):
            with contextlib.suppress(OSError):  # the process has ended: `_hear` notices it
                wire.send(self._socket, {name: numbers[at : at + _MOST_TOKENS]})

    def _hear(self) -> bool:
        """Receive a message outside an import. Returns whether the other process exists."""
        try:
            message, files = wire.receive(self._socket)
        except (OSError, ValueError):
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
            for extent in self.extents.values():
                extent.wanted = True
            if not self._is_importing:  # which may need those without a user
                self._release(list(self.extents.values()))

    def _release(self, extents: list[Extent]) -> None:
        """Unmap those extents that no tensor uses, and report them as released."""
        by_span: dict[Span, list[Extent]] = {}
        for extent in dict.fromkeys(extents):
            if not extent.users and self.extents.get(extent.id) is extent:
                by_span.setdefault(extent.span, []).append(extent)
        released = []
        for span, gone in by_span.items():
            # If the driver refuses, they stay mapped until the next request.
            with contextlib.suppress(MemsaverError):
                span.native.unmap([extent.offset for extent in gone])
                for extent in gone:
                    del self.extents[extent.id], span.at[extent.offset]
                    released.append(extent.id)
        self._tell("released", released)

    def _begin(self, use: Use) -> None:
        place = use.place
        self._is_importing, self._was_requested = True, False
        try:
            is_missing = any(number not in self.extents for number in place.ids)
            wire.send(self._socket, {"import": place.token, "missing": is_missing})
            while self._take_extents(use):
                pass
            if any(number not in self.extents for number in place.ids):
                raise SharingError(
                    f"a tensor of tag {place.tag!r} cannot be imported: its memory was freed or "
                    "replaced after it was sent; keep the tensor until the other process has it, "
                    "and send it again",
                    tag=place.tag,
                )
            use.extents = [self.extents[number] for number in place.ids]
            for extent in use.extents:
                extent.users += 1
        except MemsaverError as error:
            use.error = error
        except OSError as error:
            use.error = _gone(place.tag)
            use.error.__cause__ = error
        except Exception as error:
            use.error = SharingError(
                f"a tensor of tag {place.tag!r} cannot be imported: {error}", tag=place.tag
            )
        finally:
            self._is_importing = False
            if use.is_held and not use.extents:
                self._tell("drop", [place.token])
            if self._was_requested:
                self._release(list(self.extents.values()))
            use.is_decided.set()

    def _take_extents(self, use: Use) -> bool:
        """Receive a message of an import, and map its extents. Returns whether another follows.

        If its extents cannot be mapped, they are reported as released, and the remaining messages
        are still received.
        """
        message, files = wire.receive(self._socket)
        try:
            if not message:
                raise _gone(use.place.tag)
            if "error" in message:
                raise SharingError(message["error"], tag=message["tag"] or use.place.tag)
            if "extents" not in message:
                self._note(message)
                return True
            use.is_held = not message["more"]
            try:
                self._map(use.ordinal, message["extents"], files)
            except BaseException:
                if message["more"]:
                    with contextlib.suppress(MemsaverError):
                        while self._take_extents(use):
                            pass
                raise
            return bool(message["more"])
        finally:
            for file in files:
                os.close(file)

    def _map(self, ordinal: int, rows: list[list[int]], files: list[int]) -> None:
        """Map the extents of one message, and report those that cannot be mapped as released."""
        by_span: dict[tuple[int, int], list[tuple[list[int], int]]] = {}
        refused = [row[4] for row in rows]
        try:
            if len(files) != len(rows):
                raise SharingError(
                    "a message about shared memory arrived without its descriptors: raise the "
                    f"limit of open files (ulimit -n) by {wire.MOST_FILES}"
                )
            for row, file in zip(rows, files, strict=True):
                by_span.setdefault((row[2], row[3]), []).append((row, file))
            for (address, nbytes), pieces in by_span.items():
                span = self.spans.get((address, ordinal))
                if span is None:
                    span = self.spans[address, ordinal] = Span(ordinal, nbytes)
                places = [(row[0] - address, row[1], file) for row, file in pieces]
                self._make_room(span, places)
                span.native.map(places)
                for row, _ in pieces:
                    extent = Extent(span, row[0] - address, row[1], row[4])
                    extent.wanted = self._was_requested
                    span.at[extent.offset] = self.extents[extent.id] = extent
                    refused.remove(extent.id)
        finally:
            self._tell("released", refused)

    def _make_room(self, span: Span, places: list[tuple[int, int, int]]) -> None:
        """Unmap earlier extents that overlap new ones; their memory was freed."""
        old = [
            extent
            for extent in span.at.values()
            if any(
                at < extent.offset + extent.nbytes and extent.offset < at + nbytes
                for at, nbytes, _ in places
            )
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
            with contextlib.suppress(OSError):
                wire.send(fresh._socket, {"bye": True})
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
