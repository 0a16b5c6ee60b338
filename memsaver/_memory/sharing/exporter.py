"""The sender's server: sends the descriptors of shareable memory to processes of the same user.

One thread accepts connections and forwards requests for release; one thread for each importer
answers its messages, and detects its end. An importer's record ends when the importer reports that
it maps nothing, or when its process has ended: a closed connection alone does not show that the
memory is unmapped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
from typing import Any

from memsaver._memory.sharing import wire
from memsaver._runtime.native import _C
from memsaver.errors import MemsaverError, SharingError

__all__ = ["endpoint"]

_BACKLOG = 64


def endpoint() -> str:
    """Return the name of this process's server, which is started if necessary.

    Raises:
        SharingError: the server cannot be started.
    """
    if not _servers:
        try:
            server = _Server()
        except (OSError, RuntimeError) as error:
            message = f"tensors cannot be sent: no server could be started: {error}"
            raise SharingError(message) from error
        if _servers.setdefault(os.getpid(), server) is not server:
            server.close()
    return _servers[os.getpid()].name


def wake() -> None:
    """Wake the server's thread, which then computes its next deadline."""
    for server in list(_servers.values()):
        os.eventfd_write(server.wake, 1)


def held() -> int:
    """Return the number of sent tensors that other processes use."""
    return sum(
        len(importer.held) + importer.dropping
        for server in list(_servers.values())
        for importer in list(server.importers.values())
    )


class _Server:
    def __init__(self) -> None:
        # Abstract: no file stays behind, and no folder is needed.
        self.name = f"memsaver-share-{os.getpid()}-{secrets.token_hex(16)}"
        self.requests = _C.release_requests()
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.importers: dict[int, _Importer] = {}
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.listener.bind(f"\0{self.name}")
            self.listener.listen(_BACKLOG)
            threading.Thread(target=self._run, name="memsaver-share", daemon=True).start()
        except BaseException:
            self.listener.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self.listener.close()
        os.close(self.wake)

    def _run(self) -> None:
        from memsaver._memory.sharing import sending

        poll = select.poll()
        listener = self.listener.fileno()
        poll.register(listener, select.POLLIN)
        poll.register(self.requests, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while True:
            left = sending.forget_expired()
            for file, event in poll.poll(None if left is None else int(left * 1000) + 1):
                if file in (self.requests, self.wake):
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(file)
                    if file == self.requests:
                        self._request_release()
                elif event & (select.POLLHUP | select.POLLNVAL):
                    return
                else:
                    with contextlib.suppress(OSError):
                        self._accept()

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        try:
            pid = wire.peer_of(connection)
            importer = _Importer(connection, pid)
            threading.Thread(
                target=self._serve, args=(importer,), name=f"memsaver-share-{pid}", daemon=True
            ).start()
        except BaseException as error:
            with contextlib.suppress(OSError):
                wire.send(connection, {"error": str(error), "tag": ""})
            connection.close()

    def _serve(self, importer: _Importer) -> None:
        key = id(importer)
        self.importers[key] = importer
        try:
            importer.serve()
        finally:
            importer.close()
            del self.importers[key]

    def _request_release(self) -> None:
        for importer in list(self.importers.values()):
            with contextlib.suppress(OSError):
                wire.send(importer.connection, {"release": True})


class _Importer:
    """One process that imports memory of this process."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection = connection
        self.end_of_process: int | None = None
        if pid:  # 0: a process in another pid namespace, whose end only the connection shows
            with contextlib.suppress(OSError):
                self.end_of_process = os.pidfd_open(pid)
        self.record = _C.Importer(pid)
        self.held: dict[int, Any] = {}  # the memory that the process uses, by token
        self.dropping = 0  # entries of `held` that are being removed

    def serve(self) -> None:
        try:
            while True:
                message, files = wire.receive(self.connection)
                for file in files:  # an importer sends none
                    os.close(file)
                if "bye" in message:
                    return
                if not message:
                    break
                self._answer(message)
        except (OSError, ValueError, TypeError, KeyError, SharingError):
            pass  # a broken connection, or a message of an unknown form
        self._wait_for_the_end()

    def _wait_for_the_end(self) -> None:
        if self.end_of_process is not None:
            select.select([self.end_of_process], [], [])

    def close(self) -> None:
        self.record.close()  # before the memory is freed, which may wait for a pause
        self.held.clear()
        self.connection.close()
        if self.end_of_process is not None:
            os.close(self.end_of_process)

    def _answer(self, message: wire.Message) -> None:
        from memsaver._memory.sharing import sending

        if "import" in message:
            self._export([(int(at), int(size)) for at, size in message["import"]])
        if "released" in message:
            self.record.released([int(number) for number in message["released"]])
        for token in message.get("take", ()):
            sent = sending.take(int(token))
            if sent is not None:
                self.held[sent.token] = sent
        self.dropping = len(message.get("drop", ()))
        for token in message.get("drop", ()):
            self.held.pop(int(token), None)  # may free memory
        self.dropping = 0

    def _export(self, ranges: list[tuple[int, int]]) -> None:
        """Send the extents under the ranges, and those of other tensors that await a receiver."""
        from memsaver._memory.sharing import sending

        try:
            tag, device, *_ = _C.locate(ranges[0][0]) or ("", -1)
            if not sending.is_shareable(tag):
                raise SharingError(f"a tensor of tag {tag!r} cannot be imported: it was freed")
            try:
                wanted = ranges + sending.ranges_with(tag, device)
                rows = self.record.export_extents(wanted, wire.MOST_FILES)
            except MemsaverError:  # another tensor was freed
                wanted = ranges
                rows = self.record.export_extents(wanted, wire.MOST_FILES)
            while self._send_extents(rows):
                rows = self.record.export_extents(wanted, wire.MOST_FILES)
        except MemsaverError as error:
            wire.send(self.connection, {"error": str(error), "tag": error.tag})

    def _send_extents(self, rows: list[_C.Extent]) -> bool:
        """Send extents in one message. Returns whether there may be more."""
        has_more = len(rows) == wire.MOST_FILES
        try:
            message = {"extents": [row[:5] for row in rows], "more": has_more}
            wire.send(self.connection, message, [row[6] for row in rows])
        finally:
            for row in rows:
                os.close(row[6])
        return has_more


_servers: dict[int, _Server] = {}  # at most one; by process id


def _forget() -> None:
    """Close the parent's sockets in a forked child, so that importers notice the parent's end."""
    for server in _servers.values():
        server.listener.close()
        for importer in server.importers.values():
            importer.connection.close()
    _servers.clear()


os.register_at_fork(after_in_child=_forget)
