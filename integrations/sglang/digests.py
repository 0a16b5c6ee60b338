"""Digests of tensors, the same in a sender and in an engine's ranks."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import memsaver

__all__ = ["digest"]

_HOST = "host:"  # digests of bytes on the host are another function's


def digest(tensor: Any, like: str = "") -> str:
    """A digest of the tensor's bytes, computed where it lies: on its GPU, or on the host.

    Args:
        tensor: dense, on a GPU or on the host.
        like: a digest to be compared with; where it was computed on the host, this one is, too.

    Raises:
        ConfigError, DriverError: as `memsaver.fingerprint`.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_cuda and not like.startswith(_HOST):
        return memsaver.fingerprint(tensor)
    on_host = tensor.cpu().contiguous()
    nbytes = on_host.numel() * on_host.element_size()
    held = (ctypes.c_char * nbytes).from_address(on_host.data_ptr()) if nbytes else b""
    return _HOST + hashlib.blake2b(held, digest_size=16).hexdigest()
