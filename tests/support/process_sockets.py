"""The listening sockets and threads of this process, read from /proc/self."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from descriptors import open_descriptors

_LISTENS = "0A"


def threads() -> set[str]:
    """Return the threads of this process."""
    return set(os.listdir("/proc/self/task"))


def listening() -> list[str]:
    """Return the addresses at which this process's sockets listen."""
    own = {text[len("socket:[") : -1] for text in open_descriptors().values() if "socket" in text}
    return sorted(address for address, inode in _listeners() if inode in own)


def eventually(what: Callable[[], object], like: object, seconds: float = 30.0) -> None:
    """Wait until `what()` equals `like`, because a thread can take a moment to end."""
    deadline = time.monotonic() + seconds
    while (found := what()) != like:
        assert time.monotonic() < deadline, (found, like)
        time.sleep(0.05)


def _listeners() -> Iterator[tuple[str, str]]:
    for name, words in (("tcp", 1), ("tcp6", 4)):
        path = Path("/proc/self/net", name)
        for row in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = row.split()
            if fields[3] == _LISTENS:
                # 32-bit words in the machine's byte order.
                text = fields[1].partition(":")[0]
                parts = [int(text[8 * at : 8 * at + 8], 16) for at in range(words)]
                packed = b"".join(socket.htonl(part).to_bytes(4, "big") for part in parts)
                yield str(ipaddress.ip_address(packed)), fields[9]
