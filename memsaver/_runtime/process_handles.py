"""Descriptors that refer to processes."""

from __future__ import annotations

import ctypes
import os

__all__ = ["open_process"]

_PIDFD_OPEN = 434  # the system call's number on all architectures with CUDA


def open_process(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends. The caller closes it.

    Raises:
        OSError: there is no such process, or the system does not support such descriptors.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    # Builds of Python with old kernel headers, such as uv's, do not have the function.
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    descriptor = int(system_call(ctypes.c_long(_PIDFD_OPEN), ctypes.c_int(pid), ctypes.c_uint(0)))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return descriptor
