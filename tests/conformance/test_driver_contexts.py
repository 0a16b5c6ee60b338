"""Tests error names, initialization, fork and contexts on both drivers."""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import byref, c_int, c_void_p

from driver_api import in_child, in_thread
from driver_values import INVALID_CONTEXT, INVALID_VALUE, NOT_INITIALIZED


def test_errors_have_names_and_descriptions(drv):
    names = {
        0: "CUDA_SUCCESS",
        1: "CUDA_ERROR_INVALID_VALUE",
        2: "CUDA_ERROR_OUT_OF_MEMORY",
        3: "CUDA_ERROR_NOT_INITIALIZED",
        4: "CUDA_ERROR_DEINITIALIZED",
        201: "CUDA_ERROR_INVALID_CONTEXT",
        700: "CUDA_ERROR_ILLEGAL_ADDRESS",
        712: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        900: "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        901: "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
    }
    for code, name in names.items():
        assert drv.text("cuGetErrorName", code) == name
        assert drv.text("cuGetErrorString", code)
    assert drv.text("cuGetErrorString", 2) == "out of memory"


def test_unknown_error_has_no_name(drv):
    name = ctypes.c_void_p(1)
    assert drv.cuGetErrorName(123456, byref(name)) == INVALID_VALUE
    assert name.value is None


def test_calls_before_cuinit_fail(drv):
    def calls(drv):
        out = ctypes.create_string_buffer(64)
        return [
            drv.cuDeviceGetCount(out),
            drv.cuMemGetInfo(out, out),
            drv.cuMemAddressReserve(out, 2 << 20, 0, 0, 0),
            drv.cuMemCreate(out, 2 << 20, byref(drv.properties(0)), 0),
            drv.cuStreamCreate(out, 0),
            drv.cuMemAlloc(out, 512),
        ]

    assert in_child(drv.path, calls) == [NOT_INITIALIZED] * 6


def test_forked_child_is_refused_and_neither_hangs_nor_dies(drv):
    def forks(drv):
        drv.start()
        address, _ = drv.mapped(2 << 20)
        stream = drv.stream()
        drv.host_function(stream, lambda: time.sleep(0.2))
        drv.check("cuMemsetD8Async", address, 1, 2 << 20, stream)
        child = os.fork()
        if child == 0:
            out = ctypes.create_string_buffer(64)
            codes = {drv.cuInit(0), drv.cuMemGetInfo(out, out), drv.cuDeviceGetCount(out)}
            os._exit(0 if codes == {3} else 1)
        drv.check("cuStreamSynchronize", stream)
        return [os.waitpid(child, 0)[1], drv.read(address, 4).hex()]

    assert in_child(drv.path, forks) == [0, "01010101"]


def test_calls_that_need_a_context(drv):
    def codes():
        drv.cuCtxSetCurrent(None)
        out = ctypes.create_string_buffer(64)
        return {
            "cuMemGetInfo": drv.cuMemGetInfo(out, out),
            "cuMemAlloc": drv.cuMemAlloc(out, 512),
            "cuMemHostAlloc": drv.cuMemHostAlloc(out, 4096, 0),
            "cuStreamCreate": drv.cuStreamCreate(out, 0),
            "cuEventCreate": drv.cuEventCreate(out, 0),
            "cuCtxSynchronize": drv.cuCtxSynchronize(),
            "cuCtxGetDevice": drv.cuCtxGetDevice(out),
            "cuCtxPopCurrent": drv.cuCtxPopCurrent(out),
        }

    found = in_thread(drv, codes, with_context=False)
    assert found == dict.fromkeys(found, INVALID_CONTEXT)


def test_contexts_form_a_stack(drv):
    def body():
        assert drv.get("cuCtxGetCurrent", c_void_p) is None
        drv.check("cuCtxPushCurrent", drv.context)
        assert drv.get("cuCtxGetCurrent", c_void_p) == drv.context.value
        assert drv.get("cuCtxGetDevice", c_int) == drv.device
        assert drv.get("cuCtxPopCurrent", c_void_p) == drv.context.value
        assert drv.get("cuCtxGetCurrent", c_void_p) is None

    in_thread(drv, body, with_context=False)


def test_primary_context_is_counted(drv):
    assert drv.get("cuDevicePrimaryCtxRetain", c_void_p, drv.device) == drv.context.value
    drv.check("cuDevicePrimaryCtxRelease", drv.device)
    flags, active = ctypes.c_uint(), c_int()
    drv.check("cuDevicePrimaryCtxGetState", drv.device, byref(flags), byref(active))
    assert active.value == 1
