"""Makes one call at a time to memsaver, under faults of the driver and the operating system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from faults.checks import check_error
from faults.exceptions import DEFERRED, EXEMPT
from faults.injections import Injection
from simulated_driver import Simulator

from memsaver.errors import MemsaverError

# Calls that the rollback of a failed transition makes.
_MAPPING = frozenset({"cuMemMap", "cuMemSetAccess"})
_UNDOING = {
    "pause": _MAPPING,
    "swap": _MAPPING
    | {"cuMemUnmap", "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync", "cuStreamSynchronize"}
    | {"cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode", "pread"},
}


class System:
    """The process's simulated driver and, if os_faults is preloaded, its system calls."""

    def __init__(self, sim: Simulator) -> None:
        self.sim = sim
        self.os: Any = ctypes.CDLL(None)
        self.fails_os = hasattr(self.os, "os_faults_watch")
        if self.fails_os:
            self.os.os_faults_calls.restype = ctypes.c_uint64
            u64 = ctypes.c_uint64
            self.os.os_faults_set.argtypes = [ctypes.c_char_p, u64, ctypes.c_int, u64]
            if self.os.os_faults_watch(b"/libmemsaver.so") != 0:
                raise RuntimeError("libmemsaver.so is not loaded")

    def calls(self, fault: Injection) -> int:
        if fault.of_driver:
            return self.sim.calls(fault.call)
        return int(self.os.os_faults_calls(fault.call.encode()))

    def arm(self, fault: Injection) -> None:
        times = 0 if fault.forever else 1
        if fault.of_driver:
            self.sim.fail(fault.call, fault.code, fault.nth, times)
        else:
            self.os.os_faults_set(fault.call.encode(), fault.nth, fault.code, times)

    def clear(self) -> None:
        self.sim.clear_faults()
        if self.fails_os:
            self.os.os_faults_clear()


@dataclass
class Outcome:
    """A call's outcome: its result or error, the faults that occurred, and their number."""

    result: Any
    error: MemsaverError | None
    met: tuple[Injection, ...]
    refusals: int

    def may_park(self, kind: str) -> bool:
        """Return whether a rollback might have failed after a call of the transition failed.

        A pause maps memory only during a rollback. A swap also makes its rollback's calls in the
        forward direction, so only the second failure of a call can occur in the rollback.
        """
        undoing = any(fault.call in _UNDOING[kind] for fault in self.met)
        return undoing and (kind == "pause" or self.refusals > 1)

    @property
    def may_defer(self) -> bool:
        """Return whether memory that belongs to no tag might still be allocated in the driver."""
        return any(fault.call in DEFERRED for fault in self.met)

    @property
    def exempt(self) -> set[str]:
        """Return the counters that can permanently exceed their earlier values."""
        return {
            figure
            for exempt in EXEMPT
            for fault in self.met
            for figure in exempt.figures
            if exempt.covers(fault, figure)
        }


def attempt(
    system: System,
    faults: tuple[Injection, ...],
    call: Callable[[], Any],
    may: tuple[type[MemsaverError], ...] = (),
) -> Outcome:
    """Make a call under faults; raise AssertionError for errors other than the faults' or `may`."""
    faults = tuple(fault for fault in faults if fault.of_driver or system.fails_os)
    before = [system.calls(fault) for fault in faults]
    for fault in faults:
        system.arm(fault)
    result, error = None, None
    try:
        result = call()
    except MemsaverError as raised:
        error = raised.with_traceback(None)
    finally:
        after = [system.calls(fault) for fault in faults]
        if faults:
            system.clear()
    beyond = [
        now - then - fault.nth + 1 for fault, then, now in zip(faults, before, after, strict=True)
    ]
    met = tuple(fault for fault, count in zip(faults, beyond, strict=True) if count > 0)
    refusals = sum(
        count if fault.forever else 1
        for fault, count in zip(faults, beyond, strict=True)
        if count > 0
    )
    refusals += isinstance(error, may)  # out of memory without a fault
    if error is not None and not isinstance(error, may):
        _check_reason(error, met)
    return Outcome(result, error, met, refusals)


def _check_reason(error: MemsaverError, met: tuple[Injection, ...]) -> None:
    """Check that one of the faults, or a mapping that a fault left behind, caused the error."""
    wrong = []
    for fault in met:
        if fault.call == "cuMemUnmap" and (error.call, error.cuda_error) == ("cuMemMap", 1):
            return None
        try:
            return check_error(fault, error)
        except AssertionError as why:
            wrong.append(str(why))
    why = "; ".join(wrong)
    raise AssertionError(f"an error without a reason: {error!r}, under {met} {why}") from error
