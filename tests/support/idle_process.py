"""A process of a fake engine. It imports nothing else, because each engine starts some."""

import ctypes
import signal
import time

PR_SET_PDEATHSIG = 1


def idle(seconds, begun):
    """Sleep as a process of SGLang, which ends with the thread that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    begun.set()
    time.sleep(seconds)
