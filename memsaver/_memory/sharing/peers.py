"""The receiver's connections to the processes that sent it tensors, and the mapped memory.

Each connection has one thread, which sends and receives all messages, maps and unmaps memory, and
is the only thread that changes extents. Other threads add jobs to its queue. They acquire no lock,
because a finalizer might run in the middle of another call on the same thread.

Each use of a sent tensor begins with an import request to the sender. The sender keeps the memory
until the use has ended in this process and on this process's devices. One import request can start
the use of many tensors.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import time
import weakref
from collections.abc import Sequence

from memsaver._memory.sharing import wire
from memsaver._memory.sharing.uses import Extent, ImportRequest, Span, Use
from memsaver._runtime.background import start_daemon
from memsaver.errors import MemsaverError, SharingError

__all__ = ["Peer", "is_foreign", "peer_at"]

_ANSWER_SECONDS = 60.0  # the longest wait for an exporter, which may be resuming the tag
_GATHER_MILLISECONDS = 3
_RETRY_MILLISECONDS = 100
_LOOK_SECONDS = 1.0  # between checks that the connection's thread still runs


class Peer:
    """The connection to one process that exports memory."""

    def __init__(self, endpoint: str, tag: str) -> None:
        self.endpoint = endpoint
        self.extents: dict[int, Extent] = {}  # by id
        self.spans: dict[tuple[int, int], Span] = {}  # by the remote address and the local device
        # A `Use` in the queue is a use to end.
        self._jobs: queue.SimpleQueue[ImportRequest | Use] = queue.SimpleQueue()
        self._is_woken = False  # whether the thread will check the queue
        self._is_urgent = False  # whether it will do so without delay
        self._is_connected = True
        self._has_ended = False  # whether the connection's thread has ended
        self._refusal = ""  # the other process's reason for closing the connection, if sent
        self._is_importing = False
        self._was_requested = False  # whether a release was requested during an import
        # Closed only when this object is deleted, because any thread may write to it.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake).atexit = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _open[id(self)] = self  # before it is connected: see _forget
            self._socket.connect(f"\0{endpoint}")
            wire.peer_of(self._socket)
            start_daemon("import", self._run)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise _gone(tag) from error
            raise

    def close(self) -> None:
        """Close the connection. Its memory stays mapped."""
        self._has_ended = True
        self._socket.close()
        _open.pop(id(self), None)

    def forget(self) -> None:
        """Remove a closed connection from those that `peer_at` returns. Safe on any thread."""
        if _peers.get(self.endpoint) is self:
            _peers.pop(self.endpoint, None)

    # --- any thread

    def error(self, tag: str) -> SharingError:
        """Return the error for an import over a closed connection."""
        return SharingError(self._refusal, tag=tag) if self._refusal else _gone(tag)

    def begin(self, uses: Sequence[Use], ordinal: int) -> None:
        """Map the memory of sent tensors.

        The memory stays mapped until `end` is called for each use. The caller must call `end`, even
        after an error.

        Args:
            uses: 1 to MOST_TOKENS uses of one tag's memory on one device.
            ordinal: the device's number in this process.

        Raises:
            SharingError: see `importing.rebuild`.
        """
        request = ImportRequest(uses, ordinal)
        self._add(request)
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not request.is_decided.wait(_LOOK_SECONDS):
            if self._has_ended and not request.is_decided.is_open():
                raise self.error(request.tag)
            if time.monotonic() > deadline:
                raise SharingError(
                    f"a tensor of tag {request.tag!r} cannot be imported: its process did not "
                    f"answer within {_ANSWER_SECONDS:.0f} s",
                    tag=request.tag,
                )
        # The error's traceback refers to the request and this frame, so neither may refer to the
        # error.
        error, request.error = request.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error

    def end(self, use: Use) -> None:
        """Record the end of a use, even if the import failed or was interrupted. Safe in
        finalizers.
        """
        self._add(use)

    def _add(self, job: ImportRequest | Use) -> None:
        self._jobs.put(job)
        begins = isinstance(job, ImportRequest)
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
                ready = events.poll(_RETRY_MILLISECONDS if self._is_refused() else None)
                if not ready:
                    self._release(list(self.extents.values()))
                for file, _ in ready:
                    if file != self._wake:
                        if not self._hear():
                            events.unregister(self._socket)
                        continue
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                    if not self._is_urgent:  # wait for more jobs, to process them together
                        jobs.poll(_GATHER_MILLISECONDS)
                    self._is_urgent = self._is_woken = False
                    self._work()
        finally:
            self.close()  # first, so that a concurrent `peer_at` sees that it has ended
            self.forget()

    def _is_refused(self) -> bool:
        """Return whether any memory stays mapped only because the driver refused to unmap it.

        While the other process exists, its next release request repeats the refused calls.
        """
        return not self._is_connected and any(not each.users for each in self.extents.values())

    def _work(self) -> None:
        ended: list[Use] = []
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if isinstance(job, ImportRequest):
                self._begin(job)
            else:
                ended.append(job)
        self._end([use for use in ended if use.extents])

    def _end(self, uses: list[Use]) -> None:
        extents = [extent for use in uses for extent in use.extents]
        for extent in extents:
            extent.users -= 1
        if uses and self._is_connected:
            # The other process may reuse the memory as soon as it receives the report.
            with contextlib.suppress(MemsaverError):  # a lost context: no work uses the memory
                extents[0].span.native.drain()
            self._tell("drop", [use.place.token for use in uses])
        for use in uses:
            use.extents = []
        self._release([extent for extent in extents if extent.wanted or not self._is_connected])

    def _tell(self, name: str, numbers: list[int]) -> None:
        for at in range(0, len(numbers), wire.MOST_TOKENS):
            with contextlib.suppress(OSError):  # the process has exited: `_hear` notices it
                wire.send(self._socket, {name: numbers[at : at + wire.MOST_TOKENS]})

    def _hear(self) -> bool:
        """Receive a message outside an import, and return whether the other process exists."""
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
        if "error" in message:
            self._refusal = message["error"]
        if "release" in message:
            self._was_requested = True
            for extent in self.extents.values():
                extent.wanted = True
            if not self._is_importing:  # the import may need unused extents
                self._release(list(self.extents.values()))

    def _release(self, extents: list[Extent]) -> None:
        """Unmap the extents that no tensor uses, and report them as released.

        If the driver refuses to unmap an extent, the extent stays mapped until the next request or,
        if the other process has ended, until a retry succeeds.
        """
        by_span: dict[Span, list[Extent]] = {}
        for extent in dict.fromkeys(extents):
            if not extent.users and self.extents.get(extent.id) is extent:
                by_span.setdefault(extent.span, []).append(extent)
        released = []
        for span, gone in by_span.items():
            for extent in span.unmap(gone):
                del self.extents[extent.id], span.at[extent.offset]
                released.append(extent.id)
        self._tell("released", released)

    def _begin(self, request: ImportRequest) -> None:
        tag, uses = request.tag, request.uses
        tokens = [use.place.token for use in uses]
        wanted = {number for use in uses for number in use.place.ids}
        self._is_importing, self._was_requested = True, False
        try:
            is_missing = not wanted <= self.extents.keys()
            wire.send(self._socket, {"import": tokens, "missing": is_missing})
            while self._take_extents(request):
                pass
            if not wanted <= self.extents.keys():
                raise SharingError(
                    f"a tensor of tag {tag!r} cannot be imported: its memory was freed or "
                    "replaced after it was sent; keep the tensor until the other process has it, "
                    "and send it again",
                    tag=tag,
                )
            found = [[self.extents[number] for number in use.place.ids] for use in uses]
            for use, extents in zip(uses, found, strict=True):
                use.extents = extents
                for extent in extents:
                    extent.users += 1
        except MemsaverError as error:
            request.error = error
        except OSError as error:
            if isinstance(error, ConnectionError):
                self._hear()  # reads a refusal that was sent before the connection was closed
            request.error = self.error(tag)
            request.error.__cause__ = error
        except Exception as error:
            request.error = SharingError(
                f"a tensor of tag {tag!r} cannot be imported: {error}", tag=tag
            )
        finally:
            self._is_importing = False
            if request.is_held and request.error is not None:
                self._tell("drop", tokens)
            if self._was_requested:
                self._release(list(self.extents.values()))
            request.is_decided.open()

    def _take_extents(self, request: ImportRequest) -> bool:
        """Receive a message of an import, map its extents, and return whether another message
        follows.

        If the extents cannot be mapped, the function reports them as released, but still receives
        the remaining messages before it raises the error.
        """
        message, files = wire.receive(self._socket)
        try:
            if not message:
                raise self.error(request.tag)
            if "error" in message:
                raise SharingError(message["error"], tag=message["tag"] or request.tag)
            if "extents" not in message:
                self._note(message)
                return True
            request.is_held = not message["more"]
            try:
                self._map(request.ordinal, message["extents"], files)
            except BaseException:
                if message["more"]:
                    with contextlib.suppress(MemsaverError):
                        while self._take_extents(request):
                            pass
                raise
            return bool(message["more"])
        finally:
            for file in files:
                os.close(file)

    def _map(self, ordinal: int, rows: list[list[int]], files: list[int]) -> None:
        """Map the extents of one message, and report extents that cannot be mapped as released."""
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
        """Unmap earlier extents that overlap new extents, because their memory was freed."""
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
    """Return the connection to the process at an endpoint, creating it if necessary.

    Raises:
        SharingError: the process has exited, or belongs to another user.
    """
    peer = _peers.get(endpoint)
    if peer is None:
        fresh = Peer(endpoint, tag)
        peer = _peers.setdefault(endpoint, fresh)
        if peer is not fresh:  # another thread connected first
            with contextlib.suppress(OSError):
                wire.send(fresh._socket, {"bye": True})
        if peer._has_ended:  # perhaps before it was recorded, so its thread did not remove it
            peer.forget()
            raise peer.error(tag)
    return peer


def is_foreign(address: int) -> bool:
    """Return whether an address is in another process's memory."""
    return any(
        span.native.address <= address < span.native.address + span.nbytes
        for peer in list(_peers.values())
        for span in list(peer.spans.values())
    )


_peers: dict[str, Peer] = {}
_open: dict[int, Peer] = {}  # by id; includes connections that are not in `_peers` yet


def _forget() -> None:
    """Close the parent's sockets in a forked child, so that exporters notice the parent's exit."""
    for peer in list(_open.values()):
        peer.close()
    _peers.clear()


os.register_at_fork(after_in_child=_forget)
