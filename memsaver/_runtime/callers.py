"""Identify memsaver's caller, as a place in the program and a thread."""

from __future__ import annotations

import sys
import threading

__all__ = ["caller"]

# Modules whose frames may lie between a program's call and this module: memsaver, packages that
# re-export it, and modules that run context managers.
_BETWEEN = {"memsaver", "torch_memory_saver", "contextlib"}


def caller() -> str:
    """Return the innermost stack frame outside memsaver on this thread, and the thread's name.

    For example, the text is "/home/me/train.py:120 in sleep, thread 'MainThread'". Takes a few
    microseconds.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _BETWEEN:
            break
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # since Python 3.11
    thread = threading.current_thread().name
    return f"{code.co_filename}:{frame.f_lineno} in {name}, thread {thread!r}"
