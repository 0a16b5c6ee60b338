"""Tests fingerprints if calls fail, if memory is insufficient, or if ranges exceed the address
space."""

import pytest
from fingerprint_memory import found
from fingerprint_reference import digest

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import (
    DriverError,
    MemsaverError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
)

MIB = 1 << 20
TYPED = (DriverError, OutOfDeviceMemoryError, OutOfHostMemoryError)


# Calls of a job after the kernel is loaded; the last three release its resources.
CALLS = [
    "cuCtxPushCurrent",
    "cuMemAlloc",
    "cuMemHostRegister",
    "cuMemHostGetDevicePointer",
    "cuStreamCreate",
    "cuEventCreate",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuStreamSynchronize",
    "cuEventDestroy",
    "cuStreamDestroy",
]
MUST_FAIL = set(CALLS[:9]) - {"cuMemAlloc"}


@pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")
@pytest.mark.parametrize("code", [2, 719], ids=["out-of-memory", "launch-failed"])
@pytest.mark.parametrize("call", CALLS)
def test_every_call_fails(sim, memory, in_thread, call, code):
    ranges = [(memory.address + 8 * i, 64) for i in range(1025)]  # two batches
    expected = _C.fingerprint(ranges)

    def attempt():
        """Return the error of a job that runs on a thread without a context, or None."""
        try:
            assert in_thread(_C.fingerprint, ranges).result() == expected
        except MemsaverError as error:
            return error
        return None

    memsaver.trim(wait=True)
    before, made = sim.counts(), sim.calls(call)
    assert attempt() is None
    made = sim.calls(call) - made
    assert made > 0
    for nth in range(1, made + 1):
        for times in (1, 0):
            memsaver.trim(wait=True)
            sim.fail(call, code, nth, times)
            error = attempt()
            sim.clear_faults()
            assert error is None or (type(error) in TYPED and error.call and error.cuda_error)
            assert error or call not in MUST_FAIL or (call == "cuCtxPushCurrent" and nth > 1)
            memsaver.trim(wait=True)
            after = sim.counts()
            for kind in ("handles", "registered_bytes", "allocations", "modules"):
                assert getattr(after, kind) == getattr(before, kind), (kind, nth, times)
            if not call.endswith("Destroy"):
                assert (after.streams, after.events) == (before.streams, before.events)
            else:
                before = after  # includes objects that could not be destroyed
            assert attempt() is None


def test_an_object_that_cannot_be_destroyed_is_a_warning(sim, memory):
    with sim.fault("cuStreamDestroy", sim.LAUNCH_FAILED, times=0):
        assert found(memory.address, 64) == digest(memory.data[:64])
    texts = []
    while (text := _C.next_warning()) is not None:
        texts.append(text)
    assert [text.split()[0] for text in texts] == ["cuStreamDestroy"]


def test_no_host_memory_for_a_job(sim, memory):
    memsaver.trim(wait=True)
    sim.host_limit(sim.counts().registered_bytes + sim.counts().pinned_bytes)
    with pytest.raises(OutOfHostMemoryError) as error:
        found(memory.address, MIB)
    assert error.value.call == "cuMemHostRegister" and error.value.needed > 0
    sim.host_limit()
    assert found(memory.address, MIB) == digest(memory.data[:MIB])


def test_a_kernel_that_cannot_be_loaded(run_python):
    run_python(
        """
        import memsaver
        from memsaver import simulator
        from memsaver._runtime.native import _C
        from simulated_driver import Simulator
        sim = Simulator()
        with memsaver.region("tag"):
            buffer = simulator.buffer(4096)

        def attempt(call, code):
            sim.fail(call, code)
            try:
                _C.fingerprint([(buffer.address, 4096)])
            except memsaver.MemsaverError as error:
                assert "fingerprint kernel cannot be loaded on device 0" in str(error)
                return type(error).__name__, error.call, error.cuda_error
            finally:
                sim.clear_faults()

        for call in ("cuModuleLoadData", "cuModuleGetFunction"):
            assert attempt(call, 2) == ("OutOfDeviceMemoryError", call, 2)
            assert attempt(call, 719) == ("DriverError", call, 719)
        assert sim.counts().modules == 0
        refused = ("DriverError", "cuModuleLoadData", 209)
        assert attempt("cuModuleLoadData", 209) == refused
        calls = sim.calls("cuModuleLoadData")
        assert attempt("cuModuleGetFunction", 2) == refused  # for good
        assert sim.calls("cuModuleLoadData") == calls
        counts = sim.counts()
        assert (counts.modules, counts.streams, counts.registered_bytes) == (0, 0, 0)
        memsaver.pause("tag")
        memsaver.resume("tag")
        """
    )


def test_ranges_that_reach_beyond_everything_are_refused(run_python):
    """Two ranges are rejected if the sum of their sizes overflows to a small value.

    The fuzzer found this case.
    """
    run_python(
        """
        import resource
        import memsaver
        from simulated_driver import Block, Simulator
        from memsaver._runtime.native import _C

        sim = Simulator()
        sim.start(0)
        with memsaver.region("tag"):
            block = Block(sim, 4096, 1)
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
        try:
            _C.fingerprint(2 * [(block.address, 4096 + (1 << 63))])
            raise AssertionError("it did not fail")
        except memsaver.InvalidStateError as error:
            assert "no live allocation" in str(error), error
        assert len(_C.fingerprint(2 * [(block.address, 4096)])) == 2 * 32
        """
    )
