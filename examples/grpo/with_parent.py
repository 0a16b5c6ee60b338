"""Run a Python program that is killed when its parent process exits for any reason.

python with_parent.py PARENT PROGRAM ARGUMENT...      PARENT is the parent's process id

Linux preserves the parent-death signal across an exec but not across a fork, so the program's own
children are not killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, program: list[str]) -> None:
    """Replace this process with the program."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent exited before the prctl call
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, *program])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
