"""Set and read the process's options.

The native library defines the options in the table in csrc/core/platform/options.h. A test compares
`Options` with the table.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import Literal, NoReturn, TypeAlias

from memsaver._runtime.native import _C
from memsaver._runtime.text import did_you_mean
from memsaver.errors import ConfigError

__all__ = ["Options", "configure", "options"]

Size: TypeAlias = int | str
Flag: TypeAlias = bool | Literal["on", "off"]
Directory: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True)
class Options:
    """The options in effect. See `configure`.

    Attributes:
        share_bytes: the maximum size, in bytes, of the pieces of physical memory that allocations
            of a tag share after a resume. Without a backup, the maximum is six times as large, but
            at most 3 GiB.
        slab_bytes: the maximum size, in bytes, of the pieces of physical memory that small new
            allocations share before the first pause. An allocation is small if it is smaller than a
            quarter of this value.
        margin_bytes: device memory that new allocations leave free.
        host_bytes: the maximum total host memory of all backups; 0 means all memory that the system
            has available.
        fingerprints: whether a pause skips contents that equal their backup.
        poison: whether contents without a backup read as 0xFF bytes instead of zeros after a
            resume.
        disk_dir: the directory for backups on disk; "" means $TMPDIR, else /var/tmp, else /tmp.
        peer: the ordinal of the device whose memory backup="peer" uses. At a device's first such
            backup, "auto" selects the device with peer access that has the most free memory.
        peer_margin_bytes: device memory that backup="peer" leaves free on the peer device.
        importer_seconds: the time, in seconds, that a pause waits for other processes that use
            tensors of its tags.
        top: whether `memsaver top`, run by the same user, can query this process's statistics.
    """

    share_bytes: int
    slab_bytes: int
    margin_bytes: int
    host_bytes: int
    fingerprints: bool
    poison: bool
    disk_dir: str
    peer: int | str
    peer_margin_bytes: int
    importer_seconds: float
    top: bool


def options() -> Options:
    """Return the options in effect.

    Raises:
        ConfigError: one of memsaver's environment variables has an invalid value.
    """
    peer = _C.option("peer")
    return Options(
        share_bytes=int(_C.option("share_bytes")),
        slab_bytes=int(_C.option("slab_bytes")),
        margin_bytes=int(_C.option("margin_bytes")),
        host_bytes=int(_C.option("host_bytes")),
        fingerprints=_C.option("fingerprints") == "on",
        poison=_C.option("poison") == "on",
        disk_dir=_C.option("disk_dir"),
        peer="auto" if peer == "auto" else int(peer),
        peer_margin_bytes=int(_C.option("peer_margin_bytes")),
        importer_seconds=float(_C.option("importer_seconds")),
        top=_C.option("top") == "on",
    )


def configure(
    *,
    share_bytes: Size | None = None,
    slab_bytes: Size | None = None,
    margin_bytes: Size | None = None,
    host_bytes: Size | None = None,
    fingerprints: Flag | None = None,
    poison: Flag | None = None,
    disk_dir: Directory | None = None,
    peer: int | str | None = None,
    peer_margin_bytes: Size | None = None,
    importer_seconds: float | str | None = None,
    top: Flag | None = None,
    **_unknown: NoReturn,
) -> None:
    """Set options by name. None leaves an option unchanged.

    A size is a number of bytes, or text such as "256MiB". A flag is a bool, or "on" or "off". A
    directory is a path, or "" for the default. A device is an ordinal or "auto". Each option has an
    environment variable (such as MEMSAVER_SHARE_BYTES), which applies until this function sets the
    option.

    Args:
        share_bytes: see `Options`, which describes all options.
        slab_bytes: a size from 2 MiB to 1 GiB, like `share_bytes`.
        margin_bytes: an allocation that would leave less memory free fails with an out-of-memory
            error. torch then releases its cached memory and retries.
        host_bytes: a pause that needs more host memory raises `OutOfHostMemoryError`.
        fingerprints: if False, each pause copies all contents.
        poison: a debugging option: discarded contents read as 0xFF bytes after a resume. Code that
            relies on zeros, such as SGLang's KV cache, then fails.
        disk_dir: an existing writable directory.
        peer: a pause fails with `ConfigError` if the tag's device cannot access the peer.
        peer_margin_bytes: contents that do not fit are saved in pinned host memory.
        importer_seconds: after this time, a waiting pause raises `TagSharedError`, and a sent
            tensor that was not received may be freed.
        top: a change takes effect only before the process creates its first tag.

    Raises:
        ConfigError: a name is unknown, or a value is invalid. If a name is unknown, no option is
            set. If a value is invalid, only the options before it in the list above are set.
    """
    for name in _unknown:
        known = [field.name for field in fields(Options)]
        raise ConfigError(
            f"there is no option {name!r}; the options are {', '.join(map(repr, known))}"
            f"{did_you_mean(name, known)}"
        )
    given = {
        "share_bytes": share_bytes,
        "slab_bytes": slab_bytes,
        "margin_bytes": margin_bytes,
        "host_bytes": host_bytes,
        "fingerprints": fingerprints,
        "poison": poison,
        "disk_dir": disk_dir,
        "peer": peer,
        "peer_margin_bytes": peer_margin_bytes,
        "importer_seconds": importer_seconds,
        "top": top,
    }
    for name, value in given.items():
        if value is not None:
            _C.configure(name, os.fsencode(_text_of(name, value)))


def _text_of(name: str, value: Size | Flag | Directory | float) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and math.isfinite(value) and name == "importer_seconds":
        return f"{max(value, 0.001) if value > 0 else value:.3f}"  # milliseconds; 0 does not wait
    text = os.fsdecode(value) if isinstance(value, os.PathLike) else str(value)
    if "\0" in text:
        raise ConfigError(f"option {name} cannot be {text!r}: it contains a NUL character")
    return text
