"""Reports of a pause, a resume or a swap."""

from __future__ import annotations

from dataclasses import dataclass

from memsaver._runtime.text import size_text

__all__ = ["Change", "Report"]


@dataclass(frozen=True)
class Change:
    """The result of a transition for one tag on one device.

    Attributes:
        tag: the tag.
        device: the device's index; -1 for a tag without memory.
        changed: whether the state changed; False if the tag was already in the requested state.
        device_bytes: device memory released or mapped.
        copied_bytes: bytes copied to or from the backup.
    """

    tag: str
    device: int
    changed: bool
    device_bytes: int
    copied_bytes: int


@dataclass(frozen=True)
class Report:
    """The result of a pause, a resume or a swap.

    Attributes:
        seconds: the duration from the call to the end of the transition, including callbacks.
        changes: one entry for each tag and device; for a swap, the entries of `out` precede the
            entries of `into`.
    """

    seconds: float
    changes: tuple[Change, ...]

    @property
    def bytes(self) -> int:
        """The total device memory released or mapped; for a swap, the sum of both."""
        return sum(change.device_bytes for change in self.changes)

    @property
    def copied_bytes(self) -> int:
        """The total number of bytes copied to or from the backups."""
        return sum(change.copied_bytes for change in self.changes)

    def __str__(self) -> str:
        """Return one line, such as "weights, kv_cache: 12 GiB, 4 GiB copied, in 85.2 ms"."""
        tags = ", ".join(self.changed) or "nothing changed"
        sizes = f"{size_text(self.bytes)}, {size_text(self.copied_bytes)} copied"
        return f"{tags}: {sizes}, in {1e3 * self.seconds:,.1f} ms"

    @property
    def changed(self) -> tuple[str, ...]:
        """The tags whose state changed, in the order of `changes`."""
        return tuple(dict.fromkeys(change.tag for change in self.changes if change.changed))
