"""Raises SIGINT at every place of a call where the interpreter handles signals, one by one."""

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

from repository import TESTS

SOURCE = TESTS / "fixtures" / "interrupts" / "at_event.c"
CC = (sysconfig.get_config_var("CC") or "cc").split()


class Interrupter:
    """Interrupts calls on the main thread. Sets the signal's handler.

    Attributes:
        where: the name of the function in which the last interrupt was raised.

    Args:
        folder: the folder in which to build its library.
        number: the signal's number.
        error: the exception that the signal's handler raises.
    """

    def __init__(
        self,
        folder: str,
        number: int = signal.SIGINT,
        error: type[BaseException] = KeyboardInterrupt,
    ) -> None:
        built = Path(folder).resolve() / "at_event.so"
        command = [*CC, "-O1", "-Wall", "-fPIC", "-shared", str(SOURCE), "-o", str(built)]
        subprocess.run(command, check=True)
        library = ctypes.CDLL(str(built))
        ctypes.c_int.in_dll(library, "number").value = number
        self._seen = ctypes.c_long.in_dll(library, "seen")
        self._at = ctypes.c_long.in_dll(library, "at")
        self._function = ctypes.cast(library.at_event, ctypes.c_void_p)
        self._set_profile = ctypes.pythonapi.PyEval_SetProfile
        self._set_profile.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._set_profile.restype = None
        self._error = error

        def handler(number: int, frame: object) -> None:
            raise error

        python = signal.default_int_handler if error is KeyboardInterrupt else handler
        signal.signal(number, python)
        self.where = ""
        self._swallowed = False
        self._tell = sys.unraisablehook
        sys.unraisablehook = self._unraisable

    def places(
        self,
        call: Callable[[], object],
        every: int = 1,
        raised: Callable[[], object] = lambda: None,
    ) -> Iterator[int]:
        """Make the call again and again, interrupted `every` places later; which place it was.

        Ends after a call that was over before its interrupt, at no place that a call without one
        comes to: that call is the first, and its place 0. Raises as `interrupted` does. While an
        interrupt is on its way to the caller, `raised` is called.
        """
        self.interrupted(0, call)
        whole = self._seen.value
        if every == 1:
            yield 0
        for place in itertools.count(1, every):
            if not self.interrupted(place, call, raised) and place >= whole:
                return
            yield place

    def start(self, place: int) -> None:
        """Interrupt at that place, counted from here on. Called by the interrupted call itself."""
        self._seen.value, self._at.value = 0, place

    def interrupted(
        self,
        place: int,
        call: Callable[[], object],
        raised: Callable[[], object] = lambda: None,
    ) -> bool:
        """Make the call; whether it came to that place, where it was interrupted.

        With the place 0 the call itself says where: see `start`. One in a finalizer of Python's own
        (of `threading`'s list of threads) goes no further.

        Raises what the call raises but for the handler's error; AssertionError where that did not
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
        except self._error as error:
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            self.where = [name for name in names if name != "handler"][-1]
            raised()
            return True
        if self._swallowed:
            return True
        at = self._at.value
        assert not 0 < at <= self._seen.value, f"the interrupt at place {at} was lost"
        return False

    def _unraisable(self, what: sys.UnraisableHookArgs) -> None:
        python = getattr(what.object, "__module__", None) in ("_weakrefset", "weakref")
        if python and issubclass(what.exc_type, self._error):
            self._swallowed = True
        else:
            self._tell(what)
