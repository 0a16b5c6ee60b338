"""The messages between a process that exports memory and a process that imports it.

Each message is a packet of an abstract Unix socket (SOCK_SEQPACKET), and contains JSON and up to
MOST_FILES descriptors. Both sides check that the other process belongs to the same user.

The importer sends:
    {"import": [token, ...], "missing": bool}  begins a use of each of these sent tensors, which
        must belong to one tag on one device, and requests their extents if any are missing. The
        answer is one or more messages
        {"extents": [[address, bytes, span_address, span_bytes, id], ...], "more": bool} with a
        descriptor for each extent, or {"error": text, "tag": text}, after which no use has begun
    {"drop": [token, ...]}              ends uses of sent tensors, once for each import
    {"released": [id, ...]}             reports that the importer no longer maps these extents
    {"bye": true}                       reports that the importer maps no memory, before it closes
                                        the connection
The exporter may send at any time:
    {"release": true}           requests the release of each extent as soon as no tensor uses it
    {"error": text, "tag": ""}  rejects the connection, before the exporter closes it
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from memsaver._runtime.native import _C
from memsaver.errors import SharingError

__all__ = ["MOST_FILES", "MOST_TOKENS", "Message", "domain", "peer_of", "receive", "send"]

Message = dict[str, Any]

MOST_FILES = 250  # Linux passes at most 253 descriptors per message
MOST_TOKENS = 2000  # in a message
_MOST_BYTES = 128 << 10  # of a message


def domain() -> str:
    """Return the name of this process's domain: the processes with which it can share memory.

    The processes of a domain belong to the same user, machine and network namespace, and use the
    same version of memsaver, because messages and pickles may change with each version. The name is
    a digest, because an engine's clients may see it. Returns "" if the domain is unknown because
    /proc is missing.
    """
    import hashlib

    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    text = f"{_C.version()} {boot} {network.st_dev}:{network.st_ino} {os.geteuid()}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def peer_of(connection: socket.socket) -> int:
    """Return the other process's id, or 0 if the process has no id in this pid namespace.

    Raises:
        SharingError: the process belongs to another user.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", packed)
    if user != os.geteuid():
        raise SharingError(
            f"process {pid} of user {user} cannot share memory with this process of user "
            f"{os.geteuid()}: run both processes as the same user"
        )
    return int(pid)


def send(
    connection: socket.socket,
    message: Message,
    files: Sequence[int] = (),
    *,
    wait: bool = True,
) -> None:
    """Send a message and descriptors, which stay open. Thread-safe.

    Raises:
        BlockingIOError: `wait` is False, and the other process has too many unread messages.
        OSError: the other process has ended or has closed the connection.
    """
    import json  # imported here, because only processes that share memory need it

    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
    connection.sendmsg([json.dumps(message).encode()], rights, flags)


def receive(connection: socket.socket) -> tuple[Message, list[int]]:
    """Wait for a message, and return it with its descriptors, which the caller must close.

    An empty message means that the other process has closed the connection. If this process cannot
    receive all descriptors of a message, it receives none of them.

    Raises:
        OSError: the connection is broken, or a message has an unknown form.
    """
    import json

    data, files, flags, _ = socket.recv_fds(
        connection, _MOST_BYTES, MOST_FILES, socket.MSG_CMSG_CLOEXEC
    )
    try:
        if flags & socket.MSG_TRUNC:
            raise OSError("a message is too long")
        message = json.loads(data) if data else {}
        if not isinstance(message, dict):
            raise OSError("a message has an unknown form")
    except BaseException:
        _close(files)
        raise
    if flags & socket.MSG_CTRUNC:
        _close(files)
        files = []
    return message, files


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
