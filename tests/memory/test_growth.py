"""Tests that an allocation costs the same in tags with 1,000 and with 100,000 allocations.

The test counts driver calls. The test compares durations with a limit that distinguishes a cost
that grows with the tag (by a factor of 100) from a slow machine. `benchmarks/limits.py` measures
the durations precisely.
"""

import contextlib
import ctypes
import random
import re
import time

import pytest
from repository import ROOT

import memsaver
from memsaver._runtime.native import _C

pytestmark = pytest.mark.long

SMALL, LARGE = 1_000, 100_000
DRIVER_CALLS = re.findall(r"X\((cu\w+)\)", (ROOT / "csrc/core/driver/driver.h").read_text())
SIZE = 512
GROWTH = 10  # 100 would be a cost that grows with the tag; most of the rest is CPU cache misses


class Costs:
    """The minimum driver calls and seconds per allocation in each step, over several runs."""

    def __init__(self, sim, count):
        self.sim, self.count = sim, count
        self.calls, self.seconds = {}, {}

    @contextlib.contextmanager
    def step(self, name):
        before = sum(map(self.sim.calls, DRIVER_CALLS))
        start = time.process_time()
        yield
        seconds = (time.process_time() - start) / self.count
        calls = (sum(map(self.sim.calls, DRIVER_CALLS)) - before) / self.count
        self.seconds[name] = min(seconds, self.seconds.get(name, seconds))
        self.calls[name] = min(calls, self.calls.get(name, calls))


@pytest.fixture
def costs(sim, tag):
    def measure(count, backup, holes):
        costs = Costs(sim, count)
        name = tag(f"{backup}-{count}")
        with memsaver.region(name, backup=backup), costs.step("allocate"):
            addresses = [_C.malloc(SIZE) for _ in range(count * (1 + holes))]
        if holes:  # frees every second one, so that no live allocations are adjacent
            with costs.step("free"):
                for address in addresses[1::2]:
                    _C.free(address)
            addresses = addresses[::2]
        mixed = random.Random(1).sample(addresses, count)
        some = mixed[: SMALL // 2]
        for seed in range(1, 4):  # changed each time, so that all contents are saved
            for address in addresses:
                ctypes.c_ubyte.from_address(address).value = seed
            with costs.step("pause"):
                memsaver.pause(name)
            if backup == "host":
                with costs.step("look at a backup"):
                    for address in mixed:
                        _C.backup_view(address, SIZE)
            with costs.step("resume"):
                memsaver.resume(name)
            if backup != "none":
                for address in some:
                    assert ctypes.c_ubyte.from_address(address).value == seed
            with costs.step("whose is it"):
                assert all(map(_C.owns, mixed))
            with costs.step("list"):
                assert len(memsaver.ranges(name)) == count
        costs.count = len(some)
        with costs.step("a fingerprint"):
            for address in some:
                _C.fingerprint([(address, SIZE)])
        costs.count = count
        with costs.step("free mixed"):
            for address in mixed:
                _C.free(address)
        assert memsaver.stats()[name][0].allocations == 0
        return costs

    return measure


@pytest.mark.parametrize("holes", [False, True], ids=["dense", "holes"])
@pytest.mark.parametrize("backup", ["none", "host", "pageable", "disk"])
def test_costs_per_allocation_do_not_grow(costs, options, tmp_path, backup, holes):
    options(disk_dir=tmp_path)
    costs(SMALL, backup, holes)  # excludes the cost of the first use
    small, large = costs(SMALL, backup, holes), costs(LARGE, backup, holes)
    for step, calls in large.calls.items():
        assert calls <= 1.5 * small.calls[step] + 0.01, (step, small.calls, large.calls)
    for step, seconds in large.seconds.items():
        assert seconds <= GROWTH * small.seconds[step] + 1e-6, (step, small.seconds, large.seconds)
