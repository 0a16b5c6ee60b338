"""The sender's server, which sends descriptors of shareable memory to processes of the same user.

One thread accepts connections and forwards release requests. For each importer, another thread
answers the importer's messages and detects its exit. An importer's record ends when the importer
reports that it maps no memory, or when its process exits. A closed connection alone does not prove
that the memory is unmapped.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import socket
import time
import weakref
from typing import Any

from memsaver._memory.sharing import sent_storages, wire
from memsaver._runtime.background import start_daemon
from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError, SharingError

__all__ = ["endpoint", "expect_deadline", "held"]

_BACKLOG = 64
_RETRY_MILLISECONDS = 100


def endpoint() -> str:
    """Return the name of this process's server, starting the server if necessary.

    Raises:
        SharingError: the server cannot be started.
    """
    if not _servers:
        # An interrupt would close descriptors that the server's thread already uses.
        with signals_deferred():
            try:
                server = _Server()
            except (OSError, RuntimeError) as error:
                message = f"tensors cannot be sent: no server could be started: {error}"
                raise SharingError(message) from error
            if _servers.setdefault(os.getpid(), server) is not server:
                server.close()
    return _servers[os.getpid()].name


def expect_deadline() -> None:
    """Wake the server's thread if it waits without a limit. Call this function after adding a
    deadline.
    """
    for server in list(_servers.values()):
        if server.has_no_deadline:
            os.eventfd_write(server.wake, 1)


def held() -> int:
    """Return the number of sent tensors that other processes use."""
    return sum(
        len(importer.held)
        for server in list(_servers.values())
        for importer in list(server.importers.values())
    )


class _Server:
    def __init__(self) -> None:
        # Abstract: no file is left behind, and no folder is needed.
        self.name = f"memsaver-share-{os.getpid()}-{os.urandom(16).hex()}"
        self.requests = _C.release_requests()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.importers: dict[int, _Importer] = {}
        self.accepted: socket.socket | None = None  # the last connection, for _forget
        self.owes_requests = False  # an importer's socket was full
        self.has_no_deadline = True  # the thread waits, or is about to, without a limit
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _running[id(self)] = self  # before it listens: see _forget
            self.listener.bind(f"\0{self.name}")
            self.listener.listen(_BACKLOG)
            start_daemon("share", self._run)
        except BaseException:
            _running.pop(id(self), None)
            self.listener.close()
            os.close(self.wake)
            raise

    def close(self) -> None:
        """Stop the thread, which closes the descriptors that it uses."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._serve_all()
        finally:
            _running.pop(id(self), None)
            self.listener.close()
            if _servers.get(os.getpid()) is not self:  # otherwise, any thread may still write to it
                os.close(self.wake)

    def _serve_all(self) -> None:
        poll = select.poll()
        listener = self.listener.fileno()
        poll.register(listener, select.POLLIN)
        poll.register(self.requests, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            self.has_no_deadline = True  # set first, so that a deadline added now wakes this thread
            left = sent_storages.forget_expired()
            self.has_no_deadline = left is None
            wait = None if left is None else int(left * 1000) + 1
            if self.owes_requests:
                wait = _RETRY_MILLISECONDS
                self._request_release()
            for file, event in poll.poll(wait):
                if file in (self.requests, self.wake):
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(file)
                    if file == self.requests:
                        self._request_release()
                elif event & (select.POLLHUP | select.POLLNVAL):
                    return
                else:
                    try:
                        self._accept()
                    except OSError:  # no descriptors: the next call would fail at once, too
                        time.sleep(_RETRY_MILLISECONDS / 1000)

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        self.accepted = connection
        importer = None
        try:
            pid = wire.peer_of(connection)
            importer = _Importer(connection, pid)
            self.importers[id(importer)] = importer  # before its thread starts: see _forget
            start_daemon(f"share-{pid}", functools.partial(self._serve, importer))
        except BaseException as error:
            known = isinstance(error, SharingError)
            text = str(error) if known else f"tensors cannot be sent to another process: {error}"
            with contextlib.suppress(OSError):
                wire.send(connection, {"error": text, "tag": ""}, wait=False)
            if importer is not None:
                importer.close()
                del self.importers[id(importer)]
            connection.close()

    def _serve(self, importer: _Importer) -> None:
        try:
            importer.serve()
        finally:
            importer.close()
            del self.importers[id(importer)]

    def _request_release(self) -> None:
        """Request a release from each importer, and retry later if an importer's socket is full."""
        self.owes_requests = False
        for importer in list(self.importers.values()):
            try:
                wire.send(importer.connection, {"release": True}, wait=False)
            except BlockingIOError:
                self.owes_requests = True
            except OSError:
                pass  # the importer's thread detects the closed connection


class _Held:
    """A storage that a process uses."""

    def __init__(self, storage: Any) -> None:
        self.storage = storage
        self.uses = 0


class _Importer:
    """One process that imports memory of this process."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        # Closed with this object and no earlier, because another thread may be sending a request.
        weakref.finalize(self, connection.close).atexit = False
        self.record = _C.Importer(pid)
        self.end_of_process: int | None = None
        if pid:  # 0: a process in another pid namespace, whose end only the connection shows
            with contextlib.suppress(OSError):
                self.end_of_process = os.pidfd_open(pid)
        self.held: dict[int, _Held] = {}  # the memory that the process uses, by token

    def serve(self) -> None:
        try:
            while True:
                message, files = wire.receive(self.connection)
                for file in files:  # an importer sends no descriptors
                    os.close(file)
                if "bye" in message:
                    return
                if not message:
                    break
                self._answer(message)
        except (OSError, ValueError, TypeError, KeyError, SharingError):
            pass  # a broken connection, or a message of an unknown form
        with contextlib.suppress(OSError):  # so that the process stops waiting
            self.connection.shutdown(socket.SHUT_RDWR)
        self._wait_for_the_end()

    def _wait_for_the_end(self) -> None:
        if self.end_of_process is not None:
            poll = select.poll()  # accepts any descriptor, unlike select.select
            poll.register(self.end_of_process, select.POLLIN)
            poll.poll()

    def close(self) -> None:
        self.record.close()  # precedes the frees, because a free may wait for a pause
        for token in list(self.held):
            self._end(token)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        if self.end_of_process is not None:
            os.close(self.end_of_process)

    def _answer(self, message: wire.Message) -> None:
        if "import" in message:
            self._export([int(token) for token in message["import"]], bool(message["missing"]))
        if "released" in message:
            self.record.released([int(number) for number in message["released"]])
        self._drop([int(token) for token in message.get("drop", ())])

    def _drop(self, tokens: list[int]) -> None:
        for token in tokens:
            held = self.held.get(token)
            if held is not None:
                held.uses -= 1
                if held.uses == 0:
                    self._end(token)

    def _end(self, token: int) -> None:
        self.held[token].storage = None  # may free memory; `held()` counts it until then
        del self.held[token]

    def _export(self, tokens: list[int], are_extents_missing: bool) -> None:
        """Keep sent tensors for the importer, and answer with the extents that the importer
        lacks.
        """
        begun: list[int] = []
        claimed: list[tuple[sent_storages.Sent, int | None]] = []
        try:
            try:
                for token in tokens:
                    sent, storage = sent_storages.find(token)
                    self.held.setdefault(token, _Held(storage)).uses += 1
                    del storage
                    begun.append(token)
                    claimed.append((sent, sent_storages.claim(sent)))
                if are_extents_missing:
                    self._export_extents([sent for sent, _ in claimed])
                else:
                    self._send_extents([])
            except BaseException:
                for sent, number in claimed:
                    sent_storages.unclaim(sent, number)
                self._drop(begun)
                raise
            for _, number in claimed:
                sent_storages.take(number)
        except MemsaverError as error:
            wire.send(self.connection, {"error": str(error), "tag": error.tag})

    def _export_extents(self, found: list[sent_storages.Sent]) -> None:
        """Send the extents of these tensors, and of other tensors that await a receiver."""
        own = [(sent.address, sent.nbytes) for sent in found]
        others = [sent_storages.ranges_with(*pool) for pool in {sent.pool for sent in found}]
        try:
            wanted = list(itertools.chain(own, *others))
            rows = self.record.export_extents(wanted, wire.MOST_FILES)
        except MemsaverError:  # another tensor was freed
            wanted = own
            rows = self.record.export_extents(wanted, wire.MOST_FILES)
        while self._send_extents(rows):
            rows = self.record.export_extents(wanted, wire.MOST_FILES)

    def _send_extents(self, rows: list[_C.Extent]) -> bool:
        """Send extents in one message, and return whether more extents may remain.

        Raises:
            SharingError: the message was not sent, and the importer has none of these extents.
        """
        has_more = len(rows) == wire.MOST_FILES
        try:
            message = {"extents": [row[:5] for row in rows], "more": has_more}
            wire.send(self.connection, message, [row[6] for row in rows])
        except OSError as error:
            self.record.released([row[4] for row in rows])
            raise SharingError(f"descriptors of memory could not be sent: {error}") from error
        finally:
            for row in rows:
                os.close(row[6])
        return has_more


_servers: dict[int, _Server] = {}  # by process id: at most one entry
_running: dict[int, _Server] = {}  # by id; includes servers that are not in `_servers` yet


def _forget() -> None:
    """Close the parent's sockets in a forked child, so that importers notice the parent's exit."""
    for server in _running.values():
        server.listener.close()
        if server.accepted is not None:
            server.accepted.close()
        for importer in server.importers.values():
            importer.connection.close()
    _running.clear()
    _servers.clear()


os.register_at_fork(after_in_child=_forget)
