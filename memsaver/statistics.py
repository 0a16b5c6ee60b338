"""What each tag holds, where its memory lies, and what was saved of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from memsaver.errors import ConfigError, NotLoadedError
from memsaver.native import _C, STATES, Backup, State, backup_of, check_tag

__all__ = [
    "Range",
    "Stats",
    "TagStats",
    "backup_view",
    "configure",
    "device_memory",
    "ranges",
    "stats",
    "trim",
]


class Range(NamedTuple):
    """Device addresses, in bytes."""

    address: int
    bytes: int


@dataclass(frozen=True)
class TagStats:
    """One tag on one device.

    Attributes:
        tag: the tag.
        device: the device's index; -1 for a tag without memory.
        state: the tag's state.
        backup: the tag's policy.
        allocations: live allocations: torch's segments, not its tensors.
        allocated_bytes: their bytes.
        resident_bytes: device memory held, as the driver counts it.
        backup_bytes: bytes that the next resume brings back.
        host_bytes: pinned host memory held, kept for the next pause until `trim()`.
        pauses: pauses done, and
        resumes: resumes done, and
        last_pause_seconds: how long the last one took, for all tags of its call;
        last_resume_seconds: likewise.
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
    pauses: int
    resumes: int
    last_pause_seconds: float
    last_resume_seconds: float


@dataclass(frozen=True)
class Stats:
    """All tags on all devices, at one moment."""

    tags: tuple[TagStats, ...]

    @property
    def resident_bytes(self) -> int:
        """Device memory held by all tags."""
        return sum(row.resident_bytes for row in self.tags)

    @property
    def host_bytes(self) -> int:
        """Pinned host memory held for all backups."""
        return sum(row.host_bytes for row in self.tags)

    def __getitem__(self, tag: str) -> tuple[TagStats, ...]:
        """The rows of one tag, one for each device. Raises KeyError for an unknown one."""
        rows = tuple(row for row in self.tags if row.tag == tag)
        if not rows:
            raise KeyError(tag)
        return rows


def stats() -> Stats:
    """The figures of every tag on every device, at one moment."""
    rows: list[dict[str, Any]] = _C.stats()
    for row in rows:
        row["state"] = STATES[row["state"]]
        row["backup"] = backup_of(row["backup"])
    return Stats(tuple(TagStats(**row) for row in rows))


def ranges(tag: str, device: int | None = None) -> tuple[Range, ...]:
    """The live allocations of a tag in address order, in any state; for one device or all.

    Raises:
        UnknownTagError: no region ever named it.
    """
    rows = _C.ranges(check_tag(tag), -1 if device is None else device)
    return tuple(Range(*row) for row in rows)


def device_memory(device: int = 0) -> tuple[int, int]:
    """Free and total bytes of a device, as the driver says."""
    return _C.device_memory(device)


def backup_view(tensor: Any) -> Any:
    """A CPU tensor over the saved contents of a tensor whose tag is paused; no copy is made.

    The view has the tensor's shape, strides and dtype. It is for reading: what is written to it
    comes back with the resume. Valid until the next resume, pause or `trim()`.

    Raises:
        ConfigError: the tensor's memory is in no region.
        InvalidStateError: its tag is not paused, or was paused without a backup.
        NotLoadedError: torch is not installed.
    """
    try:
        import torch
    except ImportError:
        raise NotLoadedError(
            "backup_view makes torch tensors, and torch is not installed"
        ) from None
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"backup_view takes a torch tensor, not {type(tensor).__name__}")
    items = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return torch.empty_like(tensor, device="cpu")
    view = _C.backup_view(tensor.data_ptr(), items * tensor.element_size())
    flat = torch.frombuffer(view, dtype=tensor.dtype, count=items)
    return flat.as_strided(tuple(tensor.shape), tensor.stride(), 0)


def configure(**options: int | str) -> None:
    """Set options by name; sizes are bytes, or text such as "256MiB".

    `share_bytes` and `slab_bytes` are described in the README; each has an environment variable
    (MEMSAVER_SHARE_BYTES, MEMSAVER_SLAB_BYTES), which counts until the option is set here.

    Raises:
        ConfigError: an unknown name or value; the options before it in the call are set.
    """
    for name, value in options.items():
        _C.configure(name, str(value))


def trim() -> int:
    """Return the host memory that backs no paused tag; the bytes returned."""
    return _C.trim()
