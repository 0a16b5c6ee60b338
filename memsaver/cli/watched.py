"""Find this user's processes that use memsaver, through their sockets.

Each process has a socket in the user's runtime folder, and sends its statistics to each client that
connects. The socket has no cost until a client connects.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from memsaver._inspection.statistics import Stats, TagStats
from memsaver._runtime.native import BACKUPS, STATES
from memsaver._runtime.text import plain_text

__all__ = [
    "Device",
    "Driver",
    "Found",
    "Process",
    "Silent",
    "WatchedTag",
    "find_processes",
]

FALLBACK = "/tmp/memsaver"  # as in the core's runtime_folder.cpp; followed by the user's id
FORMAT = 1  # kStatsFormat of the core's stats_json.h

_PATIENCE = 0.5  # seconds to wait for an answer, which takes milliseconds
_MOST_BYTES = 64 << 20  # the limit on an answer's size: about 50,000 tags
_AT_ONCE = 16  # processes that are queried at the same time
_NAME = re.compile(r"(\d+)-[0-9a-f]+")
Name = TypeVar("Name", bound=str)

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Driver(NamedTuple):
    """The driver that a process has opened."""

    opened: str  # a name or path
    version: int
    simulated: bool


class Device(NamedTuple):
    """A device on which the tags of a process have memory."""

    ordinal: int  # in that process
    bus_id: str  # the same in every process
    total_bytes: int


@dataclass(frozen=True)
class WatchedTag:
    """A tag of a process on one device.

    Attributes:
        stats: the tag's row of `memsaver.stats()` in the process.
        age: seconds since the tag entered its state, or since the transition in progress began.
        caller: the caller of the transition in progress or, if there is none, of the last one, as
            described by the process, or None.
    """

    stats: TagStats
    age: float
    caller: str | None


@dataclass(frozen=True)
class Process:
    """A process that answered the query.

    Attributes:
        pid: the process id in this process's namespace. In a container, the process may have a
            different id.
        command: the command line, or the process's name if the command line cannot be read.
        memsaver: the process's version of memsaver.
        driver: the driver that the process has opened, or None.
        devices: the devices on which the process's tags have memory.
        tags: one row for each tag and device, in order of creation.
        host_bytes: host memory in use for backups.
        host_available_bytes: the additional host memory that backups may use.
    """

    pid: int
    command: str
    memsaver: str
    driver: Driver | None
    devices: tuple[Device, ...]
    tags: tuple[WatchedTag, ...]
    host_bytes: int
    host_available_bytes: int

    @property
    def stats(self) -> Stats:
        """Return the result of `memsaver.stats()` in the process."""
        rows = tuple(tag.stats for tag in self.tags)
        return Stats(rows, self.host_bytes, self.host_available_bytes)


@dataclass(frozen=True)
class Silent:
    """A process that exists but did not answer the query.

    Attributes:
        pid: see `Process`.
        command: see `Process`.
        why: the reason, as text.
    """

    pid: int
    command: str
    why: str


@dataclass(frozen=True)
class Found:
    """The result of a search for processes.

    Attributes:
        processes: the processes that answered.
        silent: the processes that did not answer.
        refused: folders that were ignored because they are not private to this user.
    """

    processes: tuple[Process, ...] = ()
    silent: tuple[Silent, ...] = ()
    refused: tuple[str, ...] = ()


def find_processes(pid: int | None = None) -> Found:
    """Query every process of this user, or only `pid`, and remove the sockets of ended processes.

    The query takes as long as the slowest answer. Processes that do not answer add at most half a
    second for every 16 processes.
    """
    answers: list[Process | Silent] = []
    refused = []
    for path in runtime_folders():
        with _opened(path) as folder:
            if folder is None:
                if os.path.lexists(path):
                    refused.append(str(path))
                continue
            names = os.listdir(f"/proc/self/fd/{folder}")
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                said = pool.map(partial(_ask, folder), filter(_NAME.fullmatch, names))
                answers += [answer for answer in said if answer is not None]
    answers = sorted(
        (answer for answer in answers if pid in (None, answer.pid)), key=lambda answer: answer.pid
    )
    return Found(
        tuple(answer for answer in answers if isinstance(answer, Process)),
        tuple(answer for answer in answers if isinstance(answer, Silent)),
        tuple(refused),
    )


def runtime_folders() -> list[Path]:
    """Return the folders in which a process may create its socket, depending on its environment."""
    # cron, su and `docker exec` do not set the variable; a login session has this folder.
    named = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    folders = [Path(named, "memsaver")] if named.startswith("/") else []
    return [*folders, Path(f"{FALLBACK}-{os.geteuid()}")]


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Yield the folder's descriptor, or None if it is missing or not private to this user."""
    try:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        facts = os.fstat(folder)
        private = facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) & 0o777 == 0o700
        yield folder if private else None
    finally:
        os.close(folder)


def _ask(folder: int, name: str) -> Process | Silent | None:
    """Return the answer of the process that owns the socket, or None if the process has ended."""
    pid, command = int(name.split("-")[0]), ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        end = time.monotonic() + _PATIENCE
        client.settimeout(_PATIENCE)
        try:
            # Connects through the descriptor, because the address has room only for a short path.
            client.connect(f"/proc/self/fd/{folder}/{name}")
            peer, user = _peer_of(client)
            if peer:  # 0 if the process is in a namespace that is not visible here
                pid, command = peer, _command_of(peer)
            if user != os.geteuid():
                return Silent(pid, command, f"it belongs to user {user}")
            return _process_of(pid, command, _read_all(client, end))
        except ConnectionRefusedError:  # no process has the socket open: its process was killed
            _remove(folder, name)
            return None
        except FileNotFoundError:
            return None
        except (TimeoutError, BlockingIOError):
            return Silent(pid, command, f"no answer within {_PATIENCE} s: is it stopped?")
        except OSError as error:
            return Silent(pid, command, error.strerror or str(error))
        except _NoAnswer as error:
            return Silent(pid, command, str(error))


class _NoAnswer(Exception):
    """An answer is missing or invalid, for the reason in the message."""


def _peer_of(client: socket.socket) -> tuple[int, int]:
    """Return the id of the process that listens on the socket, and its user."""
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def _read_all(client: socket.socket, end: float) -> bytes:
    """Read to the end of the stream. Raises `TimeoutError` at `end` (of `time.monotonic`)."""
    answer = bytearray()
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        client.settimeout(left)
        part = client.recv(1 << 20)
        if not part:
            return bytes(answer)
        answer += part
        if len(answer) > _MOST_BYTES:
            raise _NoAnswer(f"its answer has more than {_MOST_BYTES >> 20} MiB")


def _process_of(pid: int, command: str, answer: bytes) -> Process:
    if not answer:
        raise _NoAnswer("it did not answer")
    try:
        told = json.loads(answer.decode(errors="replace"))
        if told["format"] != FORMAT:
            version, spoken = (plain_text(str(told.get(n)))[:40] for n in ("memsaver", "format"))
            raise _NoAnswer(
                f"its memsaver {version} uses format {spoken}, and this version reads only {FORMAT}"
            )
        now, driver = _number(told["time_seconds"]), told["driver"]
        return Process(
            pid,
            command or plain_text(told["command"]),
            plain_text(told["memsaver"]),
            None if driver is None else _driver_of(driver),
            tuple(map(_device_of, told["devices"])),
            tuple(_tag_of(row, now) for row in told["tags"]),
            _whole(told["host_bytes"]),
            _whole(told["host_available_bytes"]),
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise _NoAnswer(f"its answer is invalid: {repr(error)[:200]}") from None


def _driver_of(row: dict[str, Any]) -> Driver:
    return Driver(plain_text(row["library"]), _whole(row["version"]), bool(row["simulated"]))


def _device_of(row: dict[str, Any]) -> Device:
    return Device(_whole(row["device"]), plain_text(row["bus_id"]), _whole(row["total_bytes"]))


def _tag_of(row: dict[str, Any], now: float) -> WatchedTag:
    figures: dict[str, Any] = {
        "tag": str(row["tag"]),
        "state": _one_of(STATES, row["state"]),
        "backup": _one_of(BACKUPS, row["backup"]),
    }
    for each in fields(TagStats):
        if each.name not in figures:
            reader = _number if each.name.endswith("_seconds") else _whole
            figures[each.name] = reader(row[each.name])
    caller = None if row["caller"] is None else plain_text(row["caller"])
    age = max(0.0, now - _number(row["since_seconds"]))
    return WatchedTag(TagStats(**figures), age, caller)


def _one_of(names: Sequence[Name], value: Any) -> Name:
    for name in names:
        if value == name:
            return name
    raise ValueError(f"{value!r} is not one of {', '.join(map(str, names))}")


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a finite number")
    return float(value)


def _command_of(pid: int) -> str:
    """Return the command line of a process as one line, or "" if it cannot be read."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return plain_text(b" ".join(words).decode(errors="replace"))


def _remove(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        pass
