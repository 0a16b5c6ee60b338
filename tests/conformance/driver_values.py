"""Constants of the CUDA driver's calls: result codes, modes, structures and signatures."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p

MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
PAGE = 2 * MIB  # the granularity of device memory

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
DEINITIALIZED = 4
NO_DEVICE = 100
INVALID_DEVICE = 101
INVALID_IMAGE = 200
INVALID_CONTEXT = 201
INVALID_PTX = 218
INVALID_HANDLE = 400
ILLEGAL_STATE = 401
NOT_FOUND = 500
NOT_READY = 600
ILLEGAL_ADDRESS = 700
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_ISOLATION = 905
CAPTURE_IMPLICIT = 906
CAPTURED_EVENT = 907
WRONG_THREAD = 908

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
NON_BLOCKING = 1
LEGACY = 1
PER_THREAD = 2
READ, READ_WRITE = 1, 3
FILE_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class AccessDesc(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", c_int)]


class Totals(ctypes.Structure):
    """The struct `sim_totals` from csrc/sim/sim.h."""

    _names = (
        "handles",
        "mappings",
        "reservations",
        "reserved_bytes",
        "allocations",
        "pinned_bytes",
        "registered_bytes",
        "streams",
        "events",
        "graphs",
        "modules",
        "captures",
        "retained_contexts",
        "queued_operations",
        "violations",
        "illegal_accesses",
        "devices",
    )
    _fields_ = [(name, ctypes.c_uint64) for name in _names] + [
        ("physical_bytes", ctypes.c_uint64 * 16)
    ]

    def as_dict(self) -> dict:
        values = {name: getattr(self, name) for name in self._names}
        return {**values, "physical_bytes": list(self.physical_bytes)}


HostFunction = ctypes.CFUNCTYPE(None, c_void_p)

_P, _S, _U, _I, _D = c_void_p, c_size_t, c_uint, c_int, ctypes.c_uint64
SIGNATURES = {
    # plain name: (exported symbol, argument types); a _D is a CUdeviceptr or a handle
    "cuInit": ("cuInit", [_U]),
    "cuDriverGetVersion": ("cuDriverGetVersion", [_P]),
    "cuGetErrorName": ("cuGetErrorName", [_I, _P]),
    "cuGetErrorString": ("cuGetErrorString", [_I, _P]),
    "cuDeviceGetCount": ("cuDeviceGetCount", [_P]),
    "cuDeviceGet": ("cuDeviceGet", [_P, _I]),
    "cuDeviceGetAttribute": ("cuDeviceGetAttribute", [_P, _I, _I]),
    "cuDeviceTotalMem": ("cuDeviceTotalMem_v2", [_P, _I]),
    "cuDeviceGetPCIBusId": ("cuDeviceGetPCIBusId", [_P, _I, _I]),
    "cuDeviceGetUuid": ("cuDeviceGetUuid_v2", [_P, _I]),
    "cuDevicePrimaryCtxRetain": ("cuDevicePrimaryCtxRetain", [_P, _I]),
    "cuDevicePrimaryCtxRelease": ("cuDevicePrimaryCtxRelease_v2", [_I]),
    "cuDevicePrimaryCtxGetState": ("cuDevicePrimaryCtxGetState", [_I, _P, _P]),
    "cuCtxGetCurrent": ("cuCtxGetCurrent", [_P]),
    "cuCtxSetCurrent": ("cuCtxSetCurrent", [_P]),
    "cuCtxPushCurrent": ("cuCtxPushCurrent_v2", [_P]),
    "cuCtxPopCurrent": ("cuCtxPopCurrent_v2", [_P]),
    "cuCtxGetDevice": ("cuCtxGetDevice", [_P]),
    "cuCtxSynchronize": ("cuCtxSynchronize", []),
    "cuCtxRecordEvent": ("cuCtxRecordEvent", [_P, _P]),
    "cuMemGetInfo": ("cuMemGetInfo_v2", [_P, _P]),
    "cuMemGetAllocationGranularity": ("cuMemGetAllocationGranularity", [_P, _P, _I]),
    "cuMemAddressReserve": ("cuMemAddressReserve", [_P, _S, _S, _D, c_ulonglong]),
    "cuMemAddressFree": ("cuMemAddressFree", [_D, _S]),
    "cuMemCreate": ("cuMemCreate", [_P, _S, _P, c_ulonglong]),
    "cuMemRelease": ("cuMemRelease", [_D]),
    "cuMemExportToShareableHandle": ("cuMemExportToShareableHandle", [_P, _D, _I, c_ulonglong]),
    "cuMemImportFromShareableHandle": ("cuMemImportFromShareableHandle", [_P, _P, _I]),
    "cuMemMap": ("cuMemMap", [_D, _S, _S, _D, c_ulonglong]),
    "cuMemUnmap": ("cuMemUnmap", [_D, _S]),
    "cuMemSetAccess": ("cuMemSetAccess", [_D, _S, _P, _S]),
    "cuMemGetAccess": ("cuMemGetAccess", [_P, _P, _D]),
    "cuMemRetainAllocationHandle": ("cuMemRetainAllocationHandle", [_P, _D]),
    "cuMemGetAllocationPropertiesFromHandle": (
        "cuMemGetAllocationPropertiesFromHandle",
        [_P, _D],
    ),
    "cuMemAlloc": ("cuMemAlloc_v2", [_P, _S]),
    "cuMemFree": ("cuMemFree_v2", [_D]),
    "cuMemHostAlloc": ("cuMemHostAlloc", [_P, _S, _U]),
    "cuMemFreeHost": ("cuMemFreeHost", [_D]),
    "cuMemHostRegister": ("cuMemHostRegister_v2", [_D, _S, _U]),
    "cuMemHostUnregister": ("cuMemHostUnregister", [_D]),
    "cuMemHostGetDevicePointer": ("cuMemHostGetDevicePointer_v2", [_P, _D, _U]),
    "cuMemcpyHtoD": ("cuMemcpyHtoD_v2", [_D, _D, _S]),
    "cuMemcpyDtoH": ("cuMemcpyDtoH_v2", [_D, _D, _S]),
    "cuMemcpyDtoD": ("cuMemcpyDtoD_v2", [_D, _D, _S]),
    "cuMemcpyHtoDAsync": ("cuMemcpyHtoDAsync_v2", [_D, _D, _S, _P]),
    "cuMemcpyDtoHAsync": ("cuMemcpyDtoHAsync_v2", [_D, _D, _S, _P]),
    "cuMemcpyDtoDAsync": ("cuMemcpyDtoDAsync_v2", [_D, _D, _S, _P]),
    "cuMemsetD8": ("cuMemsetD8_v2", [_D, c_ubyte, _S]),
    "cuMemsetD8Async": ("cuMemsetD8Async", [_D, c_ubyte, _S, _P]),
    "cuMemsetD32": ("cuMemsetD32_v2", [_D, _U, _S]),
    "cuMemsetD32Async": ("cuMemsetD32Async", [_D, _U, _S, _P]),
    "cuStreamCreate": ("cuStreamCreate", [_P, _U]),
    "cuStreamDestroy": ("cuStreamDestroy_v2", [_P]),
    "cuStreamSynchronize": ("cuStreamSynchronize", [_P]),
    "cuStreamQuery": ("cuStreamQuery", [_P]),
    "cuStreamWaitEvent": ("cuStreamWaitEvent", [_P, _P, _U]),
    "cuStreamIsCapturing": ("cuStreamIsCapturing", [_P, _P]),
    "cuStreamBeginCapture": ("cuStreamBeginCapture_v2", [_P, _I]),
    "cuStreamEndCapture": ("cuStreamEndCapture", [_P, _P]),
    "cuThreadExchangeStreamCaptureMode": ("cuThreadExchangeStreamCaptureMode", [_P]),
    "cuGraphInstantiateWithFlags": ("cuGraphInstantiateWithFlags", [_P, _P, c_ulonglong]),
    "cuGraphLaunch": ("cuGraphLaunch", [_P, _P]),
    "cuGraphExecDestroy": ("cuGraphExecDestroy", [_P]),
    "cuGraphDestroy": ("cuGraphDestroy", [_P]),
    "cuEventCreate": ("cuEventCreate", [_P, _U]),
    "cuEventRecord": ("cuEventRecord", [_P, _P]),
    "cuEventQuery": ("cuEventQuery", [_P]),
    "cuEventSynchronize": ("cuEventSynchronize", [_P]),
    "cuEventElapsedTime": ("cuEventElapsedTime_v2", [_P, _P, _P]),
    "cuEventDestroy": ("cuEventDestroy_v2", [_P]),
    "cuLaunchHostFunc": ("cuLaunchHostFunc", [_P, HostFunction, _P]),
    "cuModuleLoadData": ("cuModuleLoadData", [_P, _P]),
    "cuModuleGetFunction": ("cuModuleGetFunction", [_P, _P, c_char_p]),
    "cuModuleUnload": ("cuModuleUnload", [_P]),
    "cuLaunchKernel": ("cuLaunchKernel", [_P, *[_U] * 7, _P, _P, _P]),
    "cuPointerGetAttribute": ("cuPointerGetAttribute", [_P, _I, _D]),
    "cuDeviceGetDefaultMemPool": ("cuDeviceGetDefaultMemPool", [_P, _I]),
    "cuMemPoolTrimTo": ("cuMemPoolTrimTo", [_P, _S]),
}
OLDER = {"cuEventElapsedTime": "cuEventElapsedTime"}  # before CUDA 12.8
