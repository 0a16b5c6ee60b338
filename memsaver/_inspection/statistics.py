"""Statistics and address ranges of tags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from memsaver._memory.devices import Device, index_of
from memsaver._runtime.native import _C, STATES, Backup, State, backup_of, check_tag
from memsaver._runtime.text import size_text
from memsaver.errors import ConfigError

__all__ = [
    "Deferred",
    "Range",
    "Stats",
    "TagStats",
    "device_memory",
    "ranges",
    "stats",
]


class Range(NamedTuple):
    """A range of device addresses, in bytes."""

    address: int
    bytes: int


@dataclass(frozen=True)
class TagStats:
    """The statistics of one tag on one device.

    Attributes:
        tag: the tag.
        device: the device's index; -1 for a tag without memory.
        state: the tag's state.
        backup: the tag's policy.
        allocations: the number of live allocations, which are torch's segments and not its tensors;
            a freed segment counts until its memory is released.
        allocated_bytes: bytes of the live allocations, each rounded up to 512.
        resident_bytes: device memory in use, as counted by the driver.
        backup_bytes: bytes that the next resume restores.
        host_bytes: host memory in use for backups, kept for the next pause until it is trimmed.
        disk_bytes: file space in use for backups, kept for the next pause until it is trimmed.
        peer_bytes: memory of another device in use for backups, kept for the next pause until
            trimmed.
        pauses: pauses of the tag that succeeded, including swaps that paused it.
        resumes: resumes of the tag that succeeded, including swaps that resumed it.
        last_pause_seconds: duration of the last pause, for all tags of its call.
        last_resume_seconds: duration of the last resume, for all tags of its call.
        failures: pauses, resumes and swaps of the tag that failed.
        pause_seconds: total duration of the pauses.
        resume_seconds: total duration of the resumes.
        last_paused_bytes: device memory that the last pause released.
        last_saved_bytes: bytes that the last pause copied to the backup.
        last_resumed_bytes: device memory that the last resume mapped.
        last_restored_bytes: bytes that the last resume copied from the backup.
        paused_bytes: device memory that all pauses released.
        saved_bytes: bytes that all pauses copied to the backup.
        resumed_bytes: device memory that all resumes mapped.
        restored_bytes: bytes that all resumes copied from the backup.
        last_unchanged_pieces: pieces of at most 1 MiB that the last pause did not copy, because
            their fingerprints matched the backup.
        last_unchanged_bytes: bytes of the unchanged pieces of the last pause.
        unchanged_pieces: unchanged pieces of all pauses.
        unchanged_bytes: bytes of the unchanged pieces of all pauses.

    Counters, durations and states are per tag, and are the same in all of the tag's rows. Byte
    counts are per device. A failed transition changes only `failures`.
    """

    tag: str
    device: int
    state: State
    backup: Backup
    allocations: int
    allocated_bytes: int
    resident_bytes: int
    backup_bytes: int
    host_bytes: int
    disk_bytes: int
    peer_bytes: int
    pauses: int
    resumes: int
    last_pause_seconds: float
    last_resume_seconds: float
    failures: int
    pause_seconds: float
    resume_seconds: float
    last_paused_bytes: int
    last_saved_bytes: int
    last_resumed_bytes: int
    last_restored_bytes: int
    paused_bytes: int
    saved_bytes: int
    resumed_bytes: int
    restored_bytes: int
    last_unchanged_pieces: int
    last_unchanged_bytes: int
    unchanged_pieces: int
    unchanged_bytes: int

    def __str__(self) -> str:
        """Return one line, such as "weights on device 0: mapped, 2 GiB resident"."""
        where = f" on device {self.device}" if self.device >= 0 else ""
        sizes = [f"{size_text(self.resident_bytes)} resident"]
        for name, nbytes in (
            ("paused", self.paused_now_bytes),
            ("of backups in host memory", self.host_bytes),
            ("of backups on disk", self.disk_bytes),
            ("of backups on another device", self.peer_bytes),
        ):
            if nbytes:
                sizes.append(f"{size_text(nbytes)} {name}")
        return f"{self.tag}{where}: {self.state}, {', '.join(sizes)}"

    @property
    def paused_now_bytes(self) -> int:
        """The non-resident device memory of live allocations, which a resume will map."""
        if self.state == "mapped":
            return 0
        return max(0, self.allocated_bytes - self.resident_bytes)

    @property
    def last_pause_rate(self) -> float:
        """The rate at which the last pause released device memory, in bytes per second, or 0 before
        the first pause.

        The rate is computed from the duration of the whole call. If the call also paused other
        tags, the rate is lower than the rate of the bus or the driver.
        """
        return _rate(self.last_paused_bytes, self.last_pause_seconds)

    @property
    def last_resume_rate(self) -> float:
        """The rate at which the last resume mapped device memory, in bytes per second, or 0 before
        the first resume.
        """
        return _rate(self.last_resumed_bytes, self.last_resume_seconds)

    @property
    def last_save_rate(self) -> float:
        """The rate at which the last pause copied contents to the backup, in bytes per second, or 0
        before the first pause.
        """
        return _rate(self.last_saved_bytes, self.last_pause_seconds)

    @property
    def last_restore_rate(self) -> float:
        """The rate at which the last resume copied contents from the backup, in bytes per second,
        or 0 before the first resume.
        """
        return _rate(self.last_restored_bytes, self.last_resume_seconds)


class Deferred(NamedTuple):
    """Driver objects that the driver refused to release.

    Experimental: this API can change in any version.

    Attributes:
        objects: the number of driver objects. Every transition, allocation and `trim` retries their
            release.
        device_bytes: an upper bound on the objects' device memory, which no tag's statistics
            include.
        host_bytes: the objects' pinned host memory, which `Stats.host_bytes` includes.
    """

    objects: int = 0
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Stats:
    """The statistics of all tags on all devices, at one point in time.

    Attributes:
        tags: one row for each tag and device.
        host_bytes: the total host memory in use for backups, including temporary copy buffers.
        host_available_bytes: additional host memory that backups may use now, within the option
            `host_bytes` and the system's available memory. Comparisons ignore this value, because
            it can change without any call to memsaver.
        deferred: the memory that the driver refused to release. The statistics of another process
            do not include this memory.
    """

    tags: tuple[TagStats, ...]
    host_bytes: int
    host_available_bytes: int = field(compare=False)
    deferred: Deferred = field(default_factory=Deferred)

    @property
    def resident_bytes(self) -> int:
        """The device memory in use by all tags."""
        return sum(row.resident_bytes for row in self.tags)

    @property
    def paused_now_bytes(self) -> int:
        """The device memory that a resume of all tags will map."""
        return sum(row.paused_now_bytes for row in self.tags)

    @property
    def disk_bytes(self) -> int:
        """The file space in use for all backups."""
        return sum(row.disk_bytes for row in self.tags)

    @property
    def peer_bytes(self) -> int:
        """The memory of other devices in use for all backups."""
        return sum(row.peer_bytes for row in self.tags)

    def __str__(self) -> str:
        """Return one line for each tag and device. `repr` returns all fields."""
        return "\n".join(str(row) for row in self.tags) or "no tags"

    def __getitem__(self, tag: str) -> tuple[TagStats, ...]:
        """Return a tag's rows, one row for each device. Raises KeyError for an unknown tag."""
        rows = tuple(row for row in self.tags if row.tag == tag)
        if not rows:
            raise KeyError(tag)
        return rows


_CURRENT = -1  # the current device


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds if seconds > 0 else 0.0


def _tag_stats(row: dict[str, Any]) -> TagStats:
    """Return a row of the native statistics as a `TagStats`."""
    row["state"] = STATES[row["state"]]
    row["backup"] = backup_of(row["backup"])
    # A frozen dataclass's constructor is 15 times slower, because it sets each field through a
    # call.
    made = object.__new__(TagStats)
    made.__dict__.update(row)
    return made


def stats() -> Stats:
    """Return the statistics of every tag on every device, at one point in time."""
    tags = tuple(map(_tag_stats, _C.stats()))
    return Stats(tags, *_C.host_memory(), Deferred(*_C.deferred_releases()))


def ranges(tag: str, device: Device | None = None) -> tuple[Range, ...]:
    """Return a tag's live allocations on one device or on all devices, in address order.

    The tag can be in any state.

    Raises:
        ConfigError: the device does not exist, or it is "cuda", which has no index.
        UnknownTagError: no region has ever named the tag.
    """
    index = -1 if device is None else index_of(device)
    if index is None:
        raise ConfigError("ranges needs a device's index, such as 'cuda:0', not 'cuda'")
    rows = _C.ranges(check_tag(tag), index)
    return tuple(Range(*row) for row in rows)


def device_memory(device: Device = 0) -> tuple[int, int]:
    """Return a device's free bytes and total bytes, as reported by the driver.

    Raises:
        ConfigError: the device does not exist.
    """
    index = index_of(device)
    return _C.device_memory(_CURRENT if index is None else index)
