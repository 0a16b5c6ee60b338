"""Raises SIGINT in turn at each place in a call where the interpreter handles signals."""

from __future__ import annotations

import ctypes
import itertools
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

from built_sources import built
from repository import TESTS

SOURCE = TESTS / "fixtures" / "interrupts" / "at_event.c"


class Interrupter:
    """Interrupts calls on the main thread. Installs a signal handler.

    Attributes:
        where: the name of the function in which the last interrupt was raised.

    Args:
        number: the signal's number.
        error: the exception that the signal's handler raises.
    """

    def __init__(
        self, number: int = signal.SIGINT, error: type[BaseException] = KeyboardInterrupt
    ) -> None:
        library = ctypes.CDLL(str(built("at_event.so", [SOURCE])))
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
        """Repeat the call and interrupt it `every` places later each time; yield each place.

        The first call, at place 0, is not interrupted. The iteration ends when a call returns
        before its interrupt and the interrupt's place is beyond all places of the first call.
        Raises the same errors as `interrupted`. Calls `raised` while an interrupt propagates to the
        caller.
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
        """Interrupt at the `place`-th place after this call.

        Interrupted code can make this call.
        """
        self._seen.value, self._at.value = 0, place

    def interrupted(
        self,
        place: int,
        call: Callable[[], object],
        raised: Callable[[], object] = lambda: None,
    ) -> bool:
        """Make the call; return whether the call was interrupted at that place.

        With place 0, the call itself sets the place with `start`. An interrupt in one of Python's
        own finalizers (for `threading`'s list of threads) is counted but does not propagate.

        Raises AssertionError if an interrupt was lost, and any exception of the call except the
        handler's error.
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
            names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
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
