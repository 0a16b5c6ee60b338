"""Chooses the call for a fault among the calls that, according to the model, the operation makes.

A chance is a tuple of four small values, which is drawn before the operation is known. `injections`
converts chances to faults in the operation.
"""

from __future__ import annotations

from collections.abc import Iterable

from faults.injections import DRIVER_CALLS, OS_CALLS, SHORT, Injection, codes_of
from hypothesis import strategies as st

from model.arguments import one_of_each

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
    "peer": [
        *("cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
        *("cuMemGetInfo", "cuMemAddressReserve", "cuDeviceCanAccessPeer", "cuLaunchKernel"),
        *("cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuEventDestroy"),
    ],
}
_RESTORED = {
    "none": [],
    "host": ["cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync", "cuStreamSynchronize"],
    "pageable": ["cuMemcpyHtoDAsync", *_STAGED],
    "disk": ["cuMemcpyHtoDAsync", *_STAGED, "pread", "pread"],
    "peer": ["cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync", "cuStreamSynchronize"],
}
_OUT = ["cuMemUnmap", "cuMemUnmap", "cuMemRelease"]
_IN = ["cuMemCreate", "cuMemMap", "cuMemSetAccess"]
# Calls that a pause makes after it has saved some of the bytes.
SAVING = ["cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuMemcpyDtoHAsync", "pwrite"]
ALLOCATE = [*_IN, "malloc", "cuDevicePrimaryCtxGetState", "cuMemAddressReserve", "cuMemUnmap"]
FREE = [*_OUT, *_WAIT]
FINGERPRINT = ["cuLaunchKernel", "cuCtxPushCurrent", "malloc", "cuMemAlloc", "mmap"]
TRIM = ["cuMemHostUnregister", "munmap", "ftruncate", "close", "malloc"]

# Calls that a process makes only once, before the first operation.
_ONCE = {"cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetAttribute"}
_ANY = [name for name in [*DRIVER_CALLS, *OS_CALLS] if name not in _ONCE]
_ANY_EVERY = 7  # one in this many faults is in any call, even one that the operation may not make

_NTH = [1, 1, 1, 1, 2, 2, 3, 6]
_HOW_OFTEN = ["once", "forever", "once", "forever", "once", "forever", "never"]
_PICK = range(_ANY_EVERY * 64)
Chance = tuple[int, int, int, str]
FIRST = (_PICK, range(12), _NTH, _HOW_OFTEN)
SECOND = (_PICK, range(12), _NTH, [*_HOW_OFTEN, *4 * len(_HOW_OFTEN) * ["never"]])
mostly = st.tuples(one_of_each(*FIRST), one_of_each(*SECOND))


def of_transition(kind: str, out: Iterable[str], into: Iterable[str]) -> list[str]:
    """Return the calls that a transition makes.

    Args:
        kind: the kind of transition, which is "pause", "resume" or "swap".
        out: the backups of the tags that are paused.
        into: the backups of the tags that are resumed.
    """
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


# Calls for a second fault, which makes the rollback of the first failure fail.
UNDOING = {
    "pause": ["cuMemMap", "cuMemSetAccess"],
    "resume": ["cuMemUnmap", "cuMemRelease"],
    "swap": ["cuMemUnmap", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync", "cuCtxPushCurrent"],
}


def injections(
    chances: tuple[Chance, ...], calls: list[str], undoing: list[str] | None = None
) -> tuple[Injection, ...]:
    """Return a fault in one of `calls` per chance; faults after the first are in `undoing` if it is
    not empty.
    """
    made: list[Injection] = []
    for pick, code, nth, often in chances:
        if often == "never":
            continue
        among = undoing if made and undoing else calls
        call = _ANY[pick % len(_ANY)] if pick % _ANY_EVERY == 6 else among[pick % len(among)]
        if any(each.call == call for each in made):
            continue  # the system supports one fault per name
        number = codes_of(call)[code % len(codes_of(call))]
        once = not call.startswith("cu") and number in (SHORT, 4)  # the caller retries
        made.append(Injection("model", call, nth, number, often == "forever" and not once))
    return tuple(made)
