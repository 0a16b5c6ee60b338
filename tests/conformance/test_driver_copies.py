"""Tests copies and memsets on both drivers."""

from __future__ import annotations

import ctypes
import os
import time

from driver_values import INVALID_VALUE, NOT_READY, PAGE


def test_copies_across_handles(drv):
    address, handles = drv.reserve(3 * PAGE), [drv.create(PAGE) for _ in range(3)]
    for i, handle in enumerate(handles):
        drv.map(address + i * PAGE, PAGE, handle)
    data = os.urandom(PAGE + 12345)
    drv.write(address + 777, data)
    assert drv.read(address + 777, len(data)) == data
    drv.check("cuMemcpyDtoD", address + 2 * PAGE - 100, address + 777, 4096)
    assert drv.read(address + 2 * PAGE - 100, 4096) == data[:4096]
    drv.discard(address, 3 * PAGE, *handles)


def test_set_of_words(drv, mapped):
    drv.check("cuMemsetD32", mapped[0] + 8, 0x01020304, 3)
    assert drv.read(mapped[0], 24) == bytes(8) + bytes([4, 3, 2, 1] * 3) + bytes(4)
    assert drv.cuMemsetD32(mapped[0] + 2, 0, 1) == INVALID_VALUE


def test_pageable_copy_is_complete_when_the_call_returns(drv, mapped, streams):
    stream = streams()
    drv.host_function(stream, lambda: time.sleep(0.1))
    drv.check("cuMemsetD8Async", mapped[0], 5, PAGE, stream)
    buffer = ctypes.create_string_buffer(PAGE)
    drv.check("cuMemcpyDtoHAsync", ctypes.addressof(buffer), mapped[0], PAGE, stream)
    assert buffer.raw == b"\5" * PAGE


def test_pinned_copy_returns_before_it_is_complete(drv, mapped, streams):
    stream, pinned = streams(), drv.pinned(PAGE)
    ctypes.memset(pinned, 1, PAGE)
    with drv.gate(stream) as gate:
        gate.entered.wait(5)
        drv.check("cuMemsetD8Async", mapped[0], 2, PAGE, stream)
        drv.check("cuMemcpyDtoHAsync", pinned, mapped[0], PAGE, stream)
        assert ctypes.string_at(pinned, 4) == b"\1" * 4
        assert drv.cuStreamQuery(stream) == NOT_READY
    drv.check("cuStreamSynchronize", stream)
    assert ctypes.string_at(pinned, PAGE) == b"\2" * PAGE
    drv.check("cuMemcpyHtoDAsync", mapped[0], pinned, PAGE, stream)
    drv.check("cuStreamSynchronize", stream)
    drv.check("cuMemFreeHost", pinned)


def test_copy_of_registered_memory(drv, mapped, streams):
    stream, memory = streams(), ctypes.create_string_buffer(3 * PAGE)
    address = (ctypes.addressof(memory) + PAGE - 1) // PAGE * PAGE
    drv.check("cuMemHostRegister", address, PAGE, 0)
    ctypes.memset(address, 3, PAGE)
    drv.check("cuMemcpyHtoDAsync", mapped[0], address, PAGE, stream)
    drv.check("cuStreamSynchronize", stream)
    assert drv.read(mapped[0] + PAGE - 1, 1) == b"\3"
    drv.check("cuMemHostUnregister", address)
