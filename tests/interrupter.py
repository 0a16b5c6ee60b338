"""SIGINT at every place of a call where the interpreter can take it, one after the other."""

from __future__ import annotations

import ctypes
import itertools
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCE = Path(__file__).parent / "fixtures" / "interrupts" / "at_event.c"
CC = (sysconfig.get_config_var("CC") or "cc").split()


class Interrupter:
    """Interrupts calls on the main thread. Sets SIGINT's handler to Python's own.

    Attributes:
        where: the name of the function that the last interrupt was raised in.

    Args:
        folder: where its library is built.
    """

    def __init__(self, folder: str) -> None:
        built = Path(folder).resolve() / "at_event.so"
        command = [*CC, "-O1", "-Wall", "-fPIC", "-shared", str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(built))
        self._seen = ctypes.c_long.in_dll(library, "seen")
        self._at = ctypes.c_long.in_dll(library, "at")
        self._function = ctypes.cast(library.at_event, ctypes.c_void_p)
        self._set_profile = ctypes.pythonapi.PyEval_SetProfile
        self._set_profile.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._set_profile.restype = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.where = ""
        self._swallowed = False
        self._tell = sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def places(self, call: Callable[[], object], every: int = 1) -> Iterator[int]:
        """Make the call again and again, interrupted `every` places later; which place it was.

        Ends after the call that was over before its interrupt. Raises as `interrupted` does.
        """
        for place in itertools.count(1, every):
            if not self.interrupted(place, call):
                return
            yield place

    def start(self, place: int) -> None:
        """Interrupt at that place, counted from here on. Called by the interrupted call itself."""
        self._seen.value, self._at.value = 0, place

    def interrupted(self, place: int, call: Callable[[], object]) -> bool:
        """Make the call; whether it came to that place, where it was interrupted.

        With the place 0 the call itself says where: see `start`. One in a finalizer of Python's own
        (of `threading`'s list of threads) goes no further.

        Raises what the call raises but for the KeyboardInterrupt; AssertionError where that did not
        come.
        """
        self.start(place)
        self._swallowed = False
        try:
            self._set_profile(self._function, None)
            try:
                call()
            finally:
                self._set_profile(None, None)
        except KeyboardInterrupt as error:
            self.where = traceback.extract_tb(error.__traceback__)[-1].name
            return True
        if self._swallowed:
            return True
        at = self._at.value
        assert not 0 < at <= self._seen.value, f"the interrupt at place {at} was lost"
        return False

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        python = getattr(what.object, "__module__", None) in ("_weakrefset", "weakref")
        if python and issubclass(what.exc_type, KeyboardInterrupt):
            self._swallowed = True
        else:
            self._tell(what)
