"""Chooses the call for a fault: one that the operation will make according to the model.

A chance is four small numbers, drawn before the operation is known; `injections` turns them into
faults when it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from faults.injections import DRIVER_CALLS, OS_CALLS, SHORT, Injection, codes_of
from hypothesis import strategies as st

_WAIT = ["cuMemAlloc", "cuMemFree", "cuCtxPushCurrent", "malloc"]
_STAGED = [
    *("cuMemHostRegister", "cuMemHostUnregister", "cuStreamCreate", "cuStreamDestroy"),
    *("cuStreamSynchronize", "mmap", "pthread_create"),
]
_SAVED = {
    "none": [],
    "host": [
        *("cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync", "cuMemHostRegister", "cuLaunchKernel", "mmap"),
        *("cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuEventDestroy"),
    ],
    "pageable": ["cuMemcpyDtoHAsync", "cuLaunchKernel", *_STAGED],
    "disk": [
        *("cuMemcpyDtoHAsync", "cuLaunchKernel", *_STAGED, "pwrite", "pwrite", "fallocate"),
        *("open_unnamed", "sync_file_range"),
    ],
}
_RESTORED = {
    "none": [],
    "host": ["cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync", "cuStreamSynchronize"],
    "pageable": ["cuMemcpyHtoDAsync", *_STAGED],
    "disk": ["cuMemcpyHtoDAsync", *_STAGED, "pread", "pread"],
}
_OUT = ["cuMemUnmap", "cuMemUnmap", "cuMemRelease"]
_IN = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
# Calls that are made after some of the bytes are saved.
SAVING = ["cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyDtoHAsync", "pwrite"]
ALLOCATE = [*_IN, "malloc", "cuDevicePrimaryCtxGetState", "cuMemAddressReserve", "cuMemUnmap"]
FREE = [*_OUT, *_WAIT]
FINGERPRINT = ["cuLaunchKernel", "cuCtxPushCurrent", "malloc", "cuMemAlloc", "mmap"]
TRIM = ["cuMemHostUnregister", "munmap", "ftruncate", "close", "malloc"]

# Calls that are made once in a process, before the first operation.
_ONCE = {"cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetAttribute"}
_ANY = [name for name in [*DRIVER_CALLS, *OS_CALLS] if name not in _ONCE]
_ANY_EVERY = 7  # one in so many meets any call, if that is made at all

_NTH = [1, 1, 1, 1, 2, 2, 3, 6]
_HOW_OFTEN = ["once", "forever", "once", "forever", "once", "forever", "never"]
_chance = st.tuples(
    st.integers(0, _ANY_EVERY * 64 - 1),
    st.integers(0, 11),
    st.sampled_from(_NTH),
    st.sampled_from(_HOW_OFTEN),
)
Chance = tuple[int, int, int, str]
mostly = st.one_of(*4 * [st.tuples(_chance)], st.tuples(_chance, _chance))


def of_transition(kind: str, out: Iterable[str], into: Iterable[str]) -> list[str]:
    """What one makes, by the backups of what goes out and of what comes in."""
    calls = list(_WAIT)
    if kind != "resume":
        calls += _OUT
    if kind != "pause":
        calls += _IN
    for backup in out:
        calls += _SAVED[backup]
    for backup in into:
        calls += _RESTORED[backup]
    return calls


# What a second fault refuses, so that what the first has broken cannot be undone.
UNDOING = {
    "pause": ["cuMemMap", "cuMemSetAccess"],
    "resume": ["cuMemUnmap", "cuMemRelease"],
    "swap": ["cuMemUnmap", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync", "cuCtxPushCurrent"],
}


def injections(
    chances: tuple[Chance, ...], calls: list[str], undoing: list[str] | None = None
) -> tuple[Injection, ...]:
    """One for each chance, among these calls; the second among those that undo, if there are."""
    made: list[Injection] = []
    for pick, code, nth, often in chances:
        if often == "never":
            continue
        among = undoing if made and undoing else calls
        call = _ANY[pick % len(_ANY)] if pick % _ANY_EVERY == 6 else among[pick % len(among)]
        if any(each.call == call for each in made):
            continue  # the system supports one fault per name
        number = codes_of(call)[code % len(codes_of(call))]
        once = not call.startswith("cu") and number in (SHORT, 4)  # who is told to try again
        made.append(Injection("model", call, nth, number, often == "forever" and not once))
    return tuple(made)
