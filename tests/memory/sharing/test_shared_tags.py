"""Tests pauses of tags whose tensors other processes use."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace

import pytest
from importing_process import FILL_LATER, RUN_STREAMS, allocations, dumped

import memsaver
from memsaver._memory.sharing import exporter, sending
from memsaver._runtime.native import _C

torch = pytest.importorskip("torch")

MIB = 1 << 20


@pytest.fixture
def shared(importer, make, name, options):
    """Send a tensor of 8 MiB; return the tensor and the process, which uses the tensor as `x`."""
    mine = make(2 * MIB)
    importer.load("x", mine)
    options(importer_seconds=0.2)
    both = [mine, importer]
    yield both
    both.clear()  # pytest keeps the list


@pytest.mark.parametrize("name", ["long" * 50, "ü" * 100])
def test_the_importers_of_a_tag_with_a_long_name_are_reported(make, importer, options, name):
    mine = make(MIB)
    importer.load("x", mine)
    options(importer_seconds=0.1)
    with pytest.raises(memsaver.TagSharedError) as caught:
        memsaver.pause(name)
    assert [pid for pid, _ in caught.value.importers] == [importer.pid]


def test_the_importers_of_other_tags_are_not_reported(monkeypatch):
    rows = [("w", 11, 1), ("w2", 22, 2)]
    monkeypatch.setattr(
        sending,
        "_C",
        SimpleNamespace(importers=lambda: rows, SignalsDeferred=contextlib.nullcontext),
    )
    error = memsaver.TagSharedError("in use", tag="w")
    sending._add_importers(error)
    assert error.importers == ((11, 1),)


CALLS = {
    "pause": lambda name, other: memsaver.pause(name),
    "all": lambda name, other: memsaver.pause(),
    "background": lambda name, other: memsaver.pause(name, wait=False),
    "swap": lambda name, other: memsaver.swap(out=name, into=other),
    "block": lambda name, other: memsaver.paused(name).__enter__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_pause_names_the_processes_and_bytes(shared, name, tag, make_paused, registered, call):
    mine, importer = shared
    make_paused(other := tag("other"))
    seen = []
    registered += [memsaver.on_pause(seen.append), memsaver.on_resume(seen.append)]
    start = time.monotonic()
    with pytest.raises(memsaver.TagSharedError, match=f"process {importer.pid} .8 MiB") as caught:
        call(name, other)
    assert 0.2 <= time.monotonic() - start < 5
    assert caught.value.tag == name
    assert caught.value.importers == ((importer.pid, 8 * MIB),)
    assert isinstance(caught.value, memsaver.InvalidStateError)
    assert memsaver.state(name) == "mapped" and memsaver.state(other) == "paused"
    assert len(seen) % 2 == 0  # each notified pause was followed by a resume
    assert int(mine[-1]) == 2 * MIB - 1 == importer.ask("int(x[-1])")


def test_a_pause_waits_for_the_release(shared, name, options, in_thread, wait_until):
    mine, importer = shared
    options(importer_seconds=30)
    going = in_thread(memsaver.pause, name)
    time.sleep(0.1)
    assert memsaver.state(name) == "mapped"
    importer.do("del x; gc.collect()")
    going.result()
    assert memsaver.state(name) == "paused"
    memsaver.resume(name)
    assert int(mine[5]) == 5


def test_a_pause_waits_for_work_that_uses_the_tensor(shared, name, options, in_thread):
    """The other process unmaps the memory only after its device has finished."""
    mine, importer = shared
    options(importer_seconds=30)
    importer.do(FILL_LATER + "del x; gc.collect()")
    going = in_thread(memsaver.pause, name)
    time.sleep(0.2)
    assert memsaver.state(name) == "mapped"
    importer.do(RUN_STREAMS)
    going.result()
    memsaver.resume(name)
    assert int(mine.view(torch.uint8)[77]) == 9


def test_other_tags_are_paused_meanwhile(shared, tag, make_blocks):
    make_blocks(other := tag("other"), [MIB], backup="host")
    memsaver.pause(other)
    memsaver.resume(other)


def test_an_interrupt_ends_the_wait(shared, name, options, run_python):
    options(importer_seconds=30)
    import os
    import signal
    import threading

    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        memsaver.pause(name)
    assert time.monotonic() - start < 10
    assert memsaver.state(name) == "mapped"


def test_a_killed_importer_is_noticed(own_importer, make, name, in_thread):
    make_kept = make(2 * MIB)
    own_importer.load("x", make_kept)
    going = in_thread(memsaver.pause, name)
    time.sleep(0.1)
    own_importer.kill()
    going.result()
    assert not _C.importers()
    memsaver.resume(name)
    assert int(make_kept[-1]) == 2 * MIB - 1


# Copies `x` to memory of the process, 200 KB per second.
COPY_SLOWLY = """
import ctypes
from memsaver import simulator
driver, context, copy = ctypes.CDLL(simulator.control()._name), ctypes.c_void_p(), ctypes.c_uint64()
driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
driver.cuCtxSetCurrent(context)
driver.cuMemAlloc_v2.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
start = driver.cuMemcpyDtoDAsync_v2
start.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
driver.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
assert driver.cuMemAlloc_v2(ctypes.byref(copy), x.nbytes) == 0
simulator.control().sim_copy_rate(200_000)
assert start(copy.value, x.data_ptr(), x.nbytes, None) == 0
"""


@pytest.mark.parametrize("ends", ["", "del x; gc.collect()"], ids=["uses", "drops"])
def test_an_importer_killed_in_a_copy(own_importer, sim, make, name, options, wait_until, ends):
    mine = make(2 * MIB)
    free, _ = memsaver.device_memory(0)
    before = sim.counts()
    own_importer.load("x", mine)
    own_importer.do(COPY_SLOWLY + ends)
    own_importer.begin("driver.cuStreamSynchronize(None); copied = True")
    options(importer_seconds=0.2)
    with pytest.raises(memsaver.TagSharedError):
        memsaver.pause(name)  # the copy continues
    options(importer_seconds=10)
    own_importer.kill()
    memsaver.pause(name)
    assert not _C.importers() and not exporter.held()
    assert memsaver.device_memory(0)[0] - free >= 8 * MIB
    memsaver.resume(name)
    assert torch.equal(mine, torch.arange(2 * MIB, dtype=torch.int32))
    after = sim.counts()
    assert (after.handles, after.mappings) == (before.handles, before.mappings)
    del mine
    wait_until(lambda: allocations(name) == 0)


def test_two_importers_are_both_named(importer, own_importer, make, name, options):
    mine = make(2 * MIB)
    importer.load("x", mine)
    own_importer.load("x", mine)
    options(importer_seconds=0.1)
    with pytest.raises(memsaver.TagSharedError) as caught:
        memsaver.pause(name)
    assert {pid for pid, _ in caught.value.importers} == {importer.pid, own_importer.pid}
    own_importer.kill()
    importer.forget()
    memsaver.pause(name)


def test_memory_freed_by_its_owner_stays_readable_elsewhere(own_importer, make, name, wait_until):
    mine = make(2 * MIB)
    own_importer.load("x", mine)
    del mine
    assert allocations(name) == 1  # kept for the other process
    assert own_importer.ask("int(x[-1])") == 2 * MIB - 1
    own_importer.kill()
    wait_until(lambda: allocations(name) == 0)


@pytest.mark.each_python
def test_a_process_that_exits_with_a_tensor_is_no_longer_an_importer(make, name, run_python):
    mine = make(2 * MIB)
    message = dumped(mine).hex()
    for end in ("", "os._exit(0)"):
        program = f"""
import os, pickle, torch
received = pickle.loads(bytes.fromhex("{message}"))
assert int(received[-1]) == {2 * MIB - 1}
received[0] = 8
{end}
"""
        run_python(program, with_torch=True)
        assert mine[0] == 8
        mine[0] = 0
    memsaver.pause(name)
    assert not _C.importers()
