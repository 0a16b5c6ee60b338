"""The drivers of the conformance tests, simulated and real.

A test that leaves resources behind fails.
"""

from __future__ import annotations

import ctypes
import time

import pytest
from driver_api import Driver, real_driver_works, simulator_path
from driver_values import MIB, NON_BLOCKING, PAGE
from fingerprint_kernel import Kernel

SIMULATOR = simulator_path()
_drivers: dict[str, Driver] = {}


def library_path(which: str) -> str:
    if which == "real":
        if not real_driver_works():
            pytest.skip("libcuda.so.1 finds no GPU")
        return "libcuda.so.1"
    if SIMULATOR is None:
        pytest.skip("libmemsaver_sim.so is not built")
    return SIMULATOR


def open_driver(which: str) -> Driver:
    if which not in _drivers:
        drv = Driver(library_path(which)).start()
        # The first use of a kind of object allocates device memory permanently: not a leak.
        stream, event = drv.stream(), drv.event()
        drv.host_function(stream, lambda: None)
        block = drv.get("cuMemAlloc", ctypes.c_uint64, 512)
        drv.check("cuMemsetD8Async", block, 0, 512, stream)
        drv.check("cuStreamSynchronize", stream)
        drv.read(block, 512)
        drv.check("cuMemFree", block)
        drv.check("cuMemFreeHost", drv.pinned(4096))
        drv.check("cuEventDestroy", event)
        drv.check("cuStreamDestroy", stream)
        _drivers[which] = drv
    return _drivers[which]


def check_nothing_left(drv: Driver, free_before: int, totals_before: dict | None) -> None:
    if drv.simulated:
        deadline = time.monotonic() + 5  # for a destroyed stream's last operation
        while drv.totals()["queued_operations"] and time.monotonic() < deadline:
            time.sleep(0.005)
        assert drv.totals() == totals_before
        assert drv.free_bytes() == free_before
    else:
        assert drv.free_bytes() >= free_before - 64 * MIB


@pytest.fixture(scope="module", autouse=True)
def release_contexts():
    yield
    for driver in _drivers.values():
        driver.check("cuCtxSetCurrent", None)
        driver.check("cuDevicePrimaryCtxRelease", driver.device)
    _drivers.clear()


@pytest.fixture(params=["sim", pytest.param("real", marks=pytest.mark.gpu)])
def drv(request):
    driver = open_driver(request.param)
    driver.check("cuCtxSetCurrent", driver.context)
    totals = driver.totals() if driver.simulated else None
    free = driver.free_bytes()
    yield driver
    driver.check("cuCtxSetCurrent", driver.context)
    check_nothing_left(driver, free, totals)


@pytest.fixture
def sim():
    driver = open_driver("sim")
    driver.check("cuCtxSetCurrent", driver.context)
    totals, free = driver.totals(), driver.free_bytes()
    yield driver
    driver.opened.sim_clear_faults()
    driver.opened.sim_hold_streams(0)
    driver.opened.sim_clear_violations()
    check_nothing_left(driver, free, totals)


@pytest.fixture
def mapped(drv):
    """Yield a mapped page: (address, handle)."""
    address, handle = drv.mapped(PAGE)
    yield address, handle
    drv.discard(address, PAGE, handle)


@pytest.fixture
def streams(drv):
    """Yield a function that creates streams; destroy the streams after the test."""
    made = []

    def make(flags=NON_BLOCKING):
        made.append(drv.stream(flags))
        return made[-1]

    yield make
    for stream in made:
        drv.check("cuStreamDestroy", stream)


@pytest.fixture
def kernel(drv):
    made = Kernel(drv)
    yield made
    made.close()
