"""What a pause, a resume or a swap did."""

from __future__ import annotations

from dataclasses import dataclass

from memsaver.text import size_text

__all__ = ["Change", "Report"]


@dataclass(frozen=True)
class Change:
    """What a transition did to one tag on one device.

    Attributes:
        tag: the tag.
        device: the device's index; -1 for a tag without memory.
        changed: False where it was in the wanted state already.
        device_bytes: device memory given back, or taken.
        copied_bytes: bytes moved to the backup, or from it.
    """

    tag: str
    device: int
    changed: bool
    device_bytes: int
    copied_bytes: int


@dataclass(frozen=True)
class Report:
    """What a transition did.

    Attributes:
        seconds: how long it took, callbacks included, from the call to its end, whoever waited.
        changes: each tag on each device; of a swap, first those of `out`.
    """

    seconds: float
    changes: tuple[Change, ...]

    @property
    def bytes(self) -> int:
        """Device memory given back, or taken, in total; of a swap, both."""
        return sum(change.device_bytes for change in self.changes)

    @property
    def copied_bytes(self) -> int:
        """Bytes moved to the backups, or from them, in total."""
        return sum(change.copied_bytes for change in self.changes)

    def __str__(self) -> str:
        """In a line: "weights, kv_cache: 12 GiB, 4 GiB copied, in 85.2 ms"."""
        tags = ", ".join(self.changed) or "nothing changed"
        sizes = f"{size_text(self.bytes)}, {size_text(self.copied_bytes)} copied"
        return f"{tags}: {sizes}, in {1e3 * self.seconds:,.1f} ms"

    @property
    def changed(self) -> tuple[str, ...]:
        """The tags whose state changed, in the order of the call."""
        return tuple(dict.fromkeys(change.tag for change in self.changes if change.changed))
