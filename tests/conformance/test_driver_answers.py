"""Tests both drivers' answers to the questions that run in separate processes."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
from driver_api import in_child
from driver_values import (
    CAPTURE_IMPLICIT,
    CAPTURE_INVALIDATED,
    CAPTURE_UNSUPPORTED,
    ILLEGAL_ADDRESS,
    INVALID_DEVICE,
    INVALID_VALUE,
    NOT_PERMITTED,
    NOT_REGISTERED,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PAGE,
    READ,
    READ_WRITE,
    SUCCESS,
)
from questions.alone import ALONE

ANSWERS = {
    "reservation aligned to": "64 GiB 0 aligned, 1024 GiB 0 aligned",
    "reservation of 4 KiB": INVALID_VALUE,
    "one handle mapped at two addresses, access to both": [SUCCESS, SUCCESS, SUCCESS],
    "map a part of a handle": NOT_SUPPORTED,
    "map where nothing is reserved": INVALID_VALUE,
    "across two neighbouring reservations": {"map": 0, "set access": 0, "unmap": 0},
    "unmap first half, second half; read; unmap whole": [INVALID_VALUE, INVALID_VALUE, 0, 0],
    "unmap over a hole; then the parts": [SUCCESS, SUCCESS, SUCCESS],
    "free a reservation with a mapping; unmap; free": [INVALID_VALUE, SUCCESS, SUCCESS],
    "access over a hole": {"code": SUCCESS, "rights": [READ_WRITE, 0]},
    "access to half of a mapping": {"code": INVALID_VALUE, "rights": [0, 0]},
    "access read-only": {"code": SUCCESS, "rights": READ},
    "access taken away": {"code": SUCCESS, "rights": 0},
    "access for an unknown device": INVALID_VALUE,
    "free of null": {"cuMemFree": SUCCESS, "cuMemFreeHost": SUCCESS},
    "set memory that is reserved only": {"at once": 1, "later": 0, "the next set": 0},
    "set mapped memory without access": {"at once": 1, "later": 0, "the next set": 0},
    "copy mapped memory without access": {
        "mapped": INVALID_VALUE,
        "reserved": INVALID_VALUE,
        "later": SUCCESS,
        "the next set": SUCCESS,
    },
    "unmap under a queued set": {
        "submit": SUCCESS,
        "unmap": SUCCESS,
        "synchronize": ILLEGAL_ADDRESS,
        "then cuMemGetInfo": ILLEGAL_ADDRESS,
        "cuMemCreate": SUCCESS,
        "cuMemUnmap": SUCCESS,
        "cuMemRelease": SUCCESS,
        "cuMemAddressFree": SUCCESS,
        "cuMemRelease of the unmapped": SUCCESS,
    },
    "mapping calls without a context": {
        situation: dict.fromkeys(
            ("reserve", "create", "map", "access", "pointer", "unmap", "release", "free"), SUCCESS
        )
        for situation in ("no context at all", "retained, none current")
    },
    "primary context released under a mapping": {"read": 0, "found": "kept", "unmap": 0},
    "pointer attributes": {
        **{
            f"{place} {name}": value
            for place in ("accessible", "no access")
            for name, value in {
                "context": "null",
                "type": 2,
                "ordinal": 0,
                "range start": "reservation +0",
                "range size": 4 * PAGE,  # the size of the reservation
                "mapped": 1,
            }.items()
        },
        **{
            f"reserved {name}": "code 1"
            for name in ("context", "type", "ordinal", "range start", "range size", "mapped")
        },
    },
    "register pinned memory": {
        "register pinned": INVALID_VALUE,
        "unregister pinned": INVALID_VALUE,
        "free the middle of pinned": INVALID_VALUE,
    },
    "register pages": {
        "unaligned": SUCCESS,
        "same page, apart": SUCCESS,
        "next page": SUCCESS,
        "unregister by page": NOT_REGISTERED,
        "unregister by its address": SUCCESS,
        "unregister the middle": INVALID_VALUE,
        "nothing there": INVALID_VALUE,
    },
    "register device memory": {"reserved": INVALID_VALUE, "mapped": INVALID_VALUE},
    # HtoD, DtoH, and the asynchronous versions of both.
    "copy across registrations": {
        "of one": 4 * [SUCCESS],
        "of two": 4 * [INVALID_VALUE],
        "of one and what follows": 4 * [INVALID_VALUE],
        "of one and what precedes": 4 * [SUCCESS],
        "of two and what is around": 4 * [SUCCESS],
        "of a part of a page and the rest": 4 * [SUCCESS],
        "of the rest of that page": 4 * [SUCCESS],
    },
    "plain block": {"unmap": INVALID_VALUE, "retain handle": INVALID_VALUE},
    "two forbidden calls in a capture; end": [
        CAPTURE_UNSUPPORTED,
        CAPTURE_UNSUPPORTED,
        CAPTURE_INVALIDATED,
    ],
    "capture of a blocking stream: code, end": {
        "cuMemcpyDtoH": [CAPTURE_IMPLICIT, CAPTURE_INVALIDATED],
        "cuMemsetD8": [CAPTURE_IMPLICIT, CAPTURE_INVALIDATED],
        "is legacy capturing": [CAPTURE_IMPLICIT, SUCCESS],
        "synchronize legacy": [CAPTURE_IMPLICIT, CAPTURE_INVALIDATED],
    },
    "destroy a capturing stream; wait for the context": [SUCCESS, SUCCESS],
    "driver calls in a host function": {"cuMemGetInfo": NOT_PERMITTED, "cuMemUnmap": NOT_PERMITTED},
    "cuMemCreate of": {
        "0 bytes": INVALID_VALUE,
        "2 MiB + 4 KiB": INVALID_VALUE,
        "unknown device": INVALID_DEVICE,
        "1 PiB": OUT_OF_MEMORY,
    },
}
NOT_HELD = {
    # Released handles: undefined behaviour, as sim.h documents for the simulator.
    "release twice",
    "release twice while mapped; unmap",
    "release of a number that is no handle",
    "destroyed handles",
    # Never run on a GPU.
    "what is left after unmapping over a hole",
    "map at odd places",
    "host memory of no size",
    "small block on a full device",
    "images of garbage",
    "launch in other geometries",
    # An illegal access for the simulator; a driver with heterogeneous memory management allows it.
    "launch on host memory that is not pinned",
    # Has its own test, because it needs exclusive use of the GPU.
    "small cuMemAlloc blocks",
}


@functools.cache
def answers_of(path):
    with ThreadPoolExecutor(6) as pool:  # each process mostly waits for GPU initialisation
        found = {name: pool.submit(in_child, path, ALONE[name]) for name in ANSWERS}
    return {name: future.result() for name, future in found.items()}


@pytest.mark.parametrize("question", ANSWERS)
def test_the_answer_is_the_expected_one(drv, question):
    assert answers_of(drv.path)[question] == ANSWERS[question]


def test_every_question_is_accounted_for():
    assert set(ANSWERS) | NOT_HELD == set(ALONE)
    assert not set(ANSWERS) & NOT_HELD
