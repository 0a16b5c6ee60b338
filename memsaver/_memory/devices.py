"""Resolve device arguments without importing torch, which may not be installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

from memsaver._runtime.native import _C
from memsaver.errors import ConfigError

__all__ = ["Device", "Devices", "index_of", "indices_of"]

Device: TypeAlias = int | str | Any  # Any: a torch.device
Devices: TypeAlias = Device | Sequence[Device] | None

_NAME = re.compile(r"cuda(?::(0|[1-9][0-9]{0,8}))?")


def indices_of(devices: Devices) -> list[int]:
    """Return the indices of the devices that a caller named, or [] for the current device.

    Raises:
        ConfigError: a device is not a CUDA device or does not exist, or the sequence is empty.
    """
    if devices is None:
        return []
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        devices = [devices]
    if not devices:
        raise ConfigError(f"device={devices!r} names no device: omit it to use the current device")
    found = [index_of(device) for device in devices]
    return [] if None in found else sorted({index for index in found if index is not None})


def index_of(device: Device) -> int | None:
    """Return the index of a device, or None for "cuda", which means the current device. Opens the
    driver.

    Raises:
        ConfigError: the device is not a CUDA device or does not exist.
    """
    if isinstance(device, int) and not isinstance(device, bool):
        index = int(device)
    else:
        kind = getattr(sys.modules.get("torch"), "device", str)
        match = _NAME.fullmatch(str(device)) if isinstance(device, str | kind) else None
        if match is None:
            raise ConfigError(
                f"{device!r} is not a CUDA device: pass its index, such as 1, or 'cuda:1'"
            )
        if match[1] is None:
            return None
        index = int(match[1])
    count = _C.device_count()
    if not 0 <= index < count:
        raise ConfigError(f"there is no device {index}: this process sees {count}")
    return index
