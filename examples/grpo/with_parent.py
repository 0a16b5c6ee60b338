"""Runs a Python program that is killed when the process that started it ends, whatever ends that.

python with_parent.py PARENT PROGRAM ARGUMENT...      PARENT is that process's id

Linux keeps this over an exec, but not over a fork: a program's own children are its own matter.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, program: list[str]) -> None:
    """Become the program."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, *program])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
