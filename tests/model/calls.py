"""A call of memsaver's under faults of the driver, armed before it and gone after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conftest import Simulator
from faults.exceptions import EXEMPT, STRAYS
from faults.injections import DRIVER_CALLS, codes_of
from hypothesis import strategies as st

from memsaver.errors import MemsaverError

# Made once in a process, before the first operation.
_ONCE = {"cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetAttribute"}
_CALLS = [name for name in DRIVER_CALLS if name not in _ONCE]
# What most transitions make, so that most faults meet a call.
_FREQUENT = [
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemHostRegister",
    "cuMemcpyDtoHAsync",
    "cuMemcpyHtoDAsync",
    "cuStreamSynchronize",
]


@dataclass(frozen=True)
class Fault:
    """The `nth` coming driver call of that name fails with `code`: once, or from then on."""

    call: str
    code: int
    nth: int
    forever: bool


_CALL_CODES = [(call, code) for call in _CALLS + 8 * _FREQUENT for code in codes_of(call)]
_NTH = [1, 1, 1, 2, 2, 3, 4, 7]
_fault = st.tuples(st.sampled_from(_CALL_CODES), st.sampled_from(_NTH), st.booleans()).map(
    lambda drawn: Fault(*drawn[0], *drawn[1:])
)
faults = st.one_of(st.tuples(_fault), st.tuples(_fault, _fault))
perhaps = st.one_of(st.just(()), st.just(()), faults)


@dataclass
class Outcome:
    """What a call came to: its result or its error, and which of the faults it met."""

    result: Any
    error: MemsaverError | None
    met: tuple[Fault, ...]

    @property
    def may_park(self) -> bool:
        """Whether the driver may have refused to undo, after refusing to do."""
        return len(self.met) > 1 or any(fault.forever for fault in self.met)

    @property
    def may_stray(self) -> bool:
        """Whether the driver may hold memory that is no tag's."""
        return any(fault.call in STRAYS for fault in self.met)

    @property
    def exempt(self) -> set[str]:
        """Figures that may stay above what they were, for good."""
        return {
            figure
            for exempt in EXEMPT
            for fault in self.met
            if fault.call in exempt.calls and (fault.forever or not exempt.forever_only)
            for figure in exempt.figures
        }


def attempt(
    sim: Simulator,
    faults: tuple[Fault, ...],
    call: Callable[[], Any],
    may: tuple[type[MemsaverError], ...] = (),
) -> Outcome:
    """Makes a call. An error that is neither the faults' nor of `may` is an AssertionError."""
    last = [sim.calls(fault.call) + fault.nth for fault in faults]
    for fault in faults:
        sim.fail(fault.call, fault.code, fault.nth, 0 if fault.forever else 1)
    result, error = None, None
    try:
        result = call()
    except MemsaverError as raised:
        error = raised.with_traceback(None)
    finally:
        counts = [sim.calls(fault.call) for fault in faults]
        if faults:
            sim.clear_faults()
    met = tuple(fault for fault, nth, made in zip(faults, last, counts, strict=True) if made >= nth)
    if error is not None and not isinstance(error, may):
        named = any((error.call, error.cuda_error) == (fault.call, fault.code) for fault in met)
        if not named:
            raise AssertionError(f"an error without a reason: {error!r}, under {met}") from error
    return Outcome(result, error, met)
