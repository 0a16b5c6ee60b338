"""The program of a fake engine's process.

The module imports only standard modules because each engine starts several such processes.
"""

import ctypes
import signal
import time

PR_SET_PDEATHSIG = 1


def idle(seconds, begun):
    """Sleep like a process of SGLang, which exits when the thread that started the process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    begun.set()
    time.sleep(seconds)
