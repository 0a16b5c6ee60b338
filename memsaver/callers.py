"""Who calls memsaver: the place in the program, and the thread."""

from __future__ import annotations

import sys
import threading

__all__ = ["caller"]

# Whose frames lie between a program's call and here: memsaver, what offers it under another name,
# and what runs context managers.
_BETWEEN = {"memsaver", "torch_memory_saver", "contextlib"}


def caller() -> str:
    """The innermost place of this thread's stack that is not memsaver's, and the thread's name.

    Such as "/home/me/train.py:120 in sleep, thread 'MainThread'". Takes some microseconds.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _BETWEEN:
            break
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)  # Python 3.11 has it
    thread = threading.current_thread().name
    return f"{code.co_filename}:{frame.f_lineno} in {name}, thread {thread!r}"
