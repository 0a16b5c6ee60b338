"""Tests the details of out-of-memory errors: owners of memory, tags that can be paused, and
processes.
"""

from __future__ import annotations

import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from fake_nvml import Nvml

import memsaver
from memsaver import simulator
from memsaver._memory import shortages
from memsaver._runtime.native import _C

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def short(sim, tag, make_blocks):
    """A resume without enough free memory: a 16 MiB tag is paused, and another process uses the
    remaining memory.
    """
    paused, idle, busy = tag("paused"), tag("idle"), tag("busy")
    blocks = make_blocks(paused, [16 * MIB]), make_blocks(idle, [8 * MIB])
    memsaver.pause(paused)

    def resume() -> memsaver.OutOfDeviceMemoryError:
        with memsaver.region(busy):
            block = simulator.buffer(2 * MIB)
            sim.occupy(memsaver.device_memory(0)[0] - 4 * MIB)
            try:
                with pytest.raises(memsaver.OutOfDeviceMemoryError) as caught:
                    memsaver.resume(paused)
            finally:
                sim.occupy(0)
        del block
        return caught.value

    yield SimpleNamespace(resume=resume, paused=paused, idle=idle, busy=busy)
    del blocks


def test_the_error_lists_holders_and_pausable_tags(short):
    error = short.resume()
    assert error.device == 0 and error.tag == short.paused
    assert error.needed == 16 * MIB and error.free == 4 * MIB
    found = {holder.tag: holder for holder in error.holders}
    assert short.paused not in found
    assert found[short.idle] == memsaver.Holder(short.idle, 8 * MIB, "mapped", True)
    assert found[short.busy].bytes >= 2 * MIB
    assert not found[short.busy].pausable  # one of its regions is open
    assert list(error.holders) == sorted(error.holders, key=lambda holder: -holder.bytes)
    before, after = str(error).split(". These can be paused now: ")
    assert repr(short.busy) in before and repr(short.idle) in before
    assert repr(short.idle) in after and repr(short.busy) not in after


def test_pausing_a_pausable_tag_frees_memory_for_the_call(short, sim):
    error = short.resume()
    (can,) = [h.tag for h in error.holders if h.pausable and h.tag in (short.idle, short.busy)]
    memsaver.pause(can)
    sim.occupy(memsaver.device_memory(0)[0] - 20 * MIB)
    memsaver.resume(short.paused)
    sim.occupy(0)
    memsaver.resume(can)


def test_the_error_of_an_allocation_lists_them_too(sim, tag, make_blocks):
    idle, full = tag("idle"), tag("full")
    block = make_blocks(idle, [4 * MIB])
    sim.occupy(memsaver.device_memory(0)[0] - 2 * MIB)
    with pytest.raises(memsaver.OutOfDeviceMemoryError, match="These can be paused now") as caught:
        make_blocks(full, [32 * MIB])
    assert caught.value.device == 0
    assert idle in [holder.tag for holder in caught.value.holders if holder.pausable]
    del block


def test_tags_under_a_transition_are_not_pausable(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [4 * MIB], backup="host")
    assert _C.tag_pausable(name)
    sim.stream_delay(0.2)
    going = memsaver.pause(name, wait=False)
    assert not _C.tag_pausable(name)
    going.wait()
    assert not _C.tag_pausable(name)  # it is already paused
    memsaver.resume(name)
    assert _C.tag_pausable(name) and blocks[0].is_intact()
    with pytest.raises(memsaver.UnknownTagError):
        _C.tag_pausable("nobody's")


def test_tags_that_another_thread_or_process_uses_are_not_pausable(tag):
    name = tag()
    with memsaver.region(name, shareable=True):
        block = simulator.buffer(2 * MIB)
    reservation = _C.Reservation([name])
    reservation.take()
    assert _C.tag_pausable(name)  # this thread has the reservation
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(_C.tag_pausable, name).result(10)
    reservation.release()
    importer = _C.Importer(os.getpid())
    extents = importer.export_extents([(block.address, 1)])
    assert not _C.tag_pausable(name)
    for *_, descriptor in extents:
        os.close(descriptor)
    importer.close()
    assert _C.tag_pausable(name)


@pytest.fixture
def nvml(monkeypatch):
    def install(rows, broken=()):
        made = Nvml(rows, broken)
        monkeypatch.setitem(sys.modules, "pynvml", made)
        return made

    return install


def test_other_processes_are_named(short, nvml):
    ours = (os.getpid(), "python", 5 * GIB)
    made = nvml([(41, "/usr/bin/python3 -m train", GIB), (42, b"vllm", 12 * GIB), ours])
    error = short.resume()
    assert error.processes == (
        memsaver.DeviceProcess(42, "vllm", 12 * GIB),
        memsaver.DeviceProcess(41, "python3", GIB),
    )
    assert str(error).endswith(". Other processes on the GPU: 42 vllm (12 GiB), 41 python3 (1 GiB)")
    assert made.bus_ids == [_C.device_bus_id(0)]
    assert made.opened == 0


def test_nvml_is_queried_only_for_errors(sim, tag, make_blocks, nvml):
    made = nvml([])
    name = tag()
    block = make_blocks(name, [MIB])
    memsaver.pause(name)
    memsaver.resume(name)
    del block
    with pytest.raises(memsaver.UnknownTagError):
        memsaver.pause("nobody's")
    assert made.bus_ids == [] and made.opened == 0


@pytest.mark.parametrize(
    "broken",
    ["nvmlInit", "nvmlDeviceGetHandleByPciBusId", "nvmlDeviceGetComputeRunningProcesses"],
)
def test_a_broken_nvml_is_left_out(short, nvml, broken):
    made = nvml([(42, "vllm", GIB)], broken=(broken,))
    error = short.resume()
    assert error.processes == () and "Other processes" not in str(error)
    assert error.holders and made.opened == 0


def test_values_that_nvml_does_not_report_are_left_out(short, nvml):
    nvml([(42, "vllm", None)], broken=("nvmlSystemGetProcessName",))
    error = short.resume()
    assert error.processes == (memsaver.DeviceProcess(42, "", None),)
    assert str(error).endswith(". Other processes on the GPU: 42")


def test_without_nvml_there_are_no_processes(short, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert short.resume().processes == ()


def test_the_error_can_be_pickled(short):
    error = short.resume()
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.holders, again.processes, again.device) == (error.holders, (), 0)


def test_the_same_for_an_error_of_torchs(short, nvml):
    nvml([(42, "vllm", 12 * GIB)])
    text = shortages.describe(0)
    assert f"{short.idle!r} 8 MiB" in text and "42 vllm (12 GiB)" in text and "are free" in text
