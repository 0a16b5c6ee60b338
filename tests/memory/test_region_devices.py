"""Tests the device of a region on the simulated driver, without torch."""

import pytest

import memsaver
from memsaver import simulator

TWO = {"MEMSAVER_SIM_DEVICES": 2, "MEMSAVER_SIM_MEMORY": "1GiB"}


def test_memory_lies_on_the_regions_device(run_python):
    run_python(
        """
        import memsaver, torch
        from memsaver import simulator

        def devices_of(tag):
            return [row.device for row in memsaver.stats()[tag] if row.allocated_bytes]

        for number, named in enumerate([1, "cuda:1", torch.device("cuda", 1), [1], (1, 1)]):
            with memsaver.region(f"t{number}", device=named):
                kept = [simulator.buffer(4 << 20), simulator.empty(1 << 20)]
            assert devices_of(f"t{number}") == [1], named

        @memsaver.region("decorated", device=1)
        def make():
            with memsaver.region("inner"):
                inner = simulator.buffer(4 << 20)
            return inner, simulator.buffer(4 << 20)

        made = make()
        assert devices_of("inner") == [0] and devices_of("decorated") == [1]
        """,
        with_torch=True,
        **TWO,
    )


def test_memory_of_other_devices_is_refused(run_python):
    run_python(
        """
        import memsaver
        from memsaver import simulator
        from refusals import raises

        with memsaver.region("t", device=1):
            text = raises(memsaver.InvalidStateError, simulator.buffer, 4096, 0)
            assert "not for device 0" in text, text
        with memsaver.region("t", device=[0, "cuda:1"]):
            kept = [simulator.buffer(4096, 0), simulator.buffer(4096, "cuda:1")]
        for anything in (None, "cuda"):
            with memsaver.region("t", device=anything):
                kept += [simulator.buffer(4096), simulator.buffer(4096, 1)]
        assert {row.device: row.allocations for row in memsaver.stats()["t"]} == {0: 3, 1: 3}
        """,
        **TWO,
    )


# Functions that allocate memory in a region, open a context of the program on device 1, and query
# which memory device 1 can access.
LATER = """
    import contextlib, ctypes
    import memsaver
    from memsaver import simulator
    from memsaver._runtime.native import _C
    from simulated_driver import Simulator

    sim = Simulator()

    def make(tag):
        with memsaver.region(tag, backup="host"):
            return simulator.buffer(64 << 20)

    @contextlib.contextmanager
    def context():
        assert sim.opened.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 1) == 0
        yield
        assert sim.opened.cuDevicePrimaryCtxRelease_v2(1) == 0

    def accessible(*buffers):
        flags, device = ctypes.c_uint64(), (ctypes.c_int * 2)(1, 1)
        found = []
        for buffer in buffers:
            address = ctypes.c_uint64(buffer.address)
            assert sim.opened.cuMemGetAccess(ctypes.byref(flags), device, address) == 0
            found.append(flags.value == 3)
        return found
"""


def test_a_device_that_comes_into_use_again_can_access_all_memory(run_python):
    run_python(
        LATER
        + """
    first = make("a")
    with context():
        second = make("b")
        assert accessible(first, second) == [True, True]
    third = make("c")
    assert accessible(third) == [False]
    with context():
        _C.refresh_peers()
        assert accessible(first, second, third) == [True, True, True]
    """,
        **TWO,
    )


@pytest.mark.parametrize(
    ("call", "refused"),
    [("cuMemSetAccess", [False, True, False]), ("cuDeviceCanAccessPeer", [False, True, True])],
)
def test_access_that_the_driver_refuses_is_granted_later(run_python, call, refused):
    run_python(
        LATER
        + f"""
    buffers = [make("a"), make("b"), make("b")]
    with context():
        with sim.fault({call!r}, sim.OUT_OF_MEMORY, nth=2):  # of tag b
            _C.refresh_peers()
        assert [not granted for granted in accessible(*buffers)] == {refused}
        _C.refresh_peers()
        assert accessible(*buffers) == [True, True, True]
    """,
        **TWO,
    )


WRONG = [7, "cuda:9", "banana", [0, 5], -1, 1.5, "cpu", "cuda:01", True, [], "", [None], b"cuda"]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_invalid_devices_are_rejected(sim, tag, wrong):
    name = tag()
    with pytest.raises(memsaver.ConfigError, match="device"), memsaver.region(name, device=wrong):
        raise AssertionError("it was entered")
    with pytest.raises(memsaver.UnknownTagError):
        memsaver.state(name)  # the attempt has created no tag
    if not isinstance(wrong, list):
        with memsaver.region(name), pytest.raises(memsaver.ConfigError, match="device"):
            simulator.buffer(4096, device=wrong)


def test_torchs_other_devices_are_refused(sim, tag):
    torch = pytest.importorskip("torch")
    for wrong in ("cpu", "meta", "cuda:3"):
        with pytest.raises(memsaver.ConfigError, match="device"):
            memsaver.region(tag(), device=torch.device(wrong)).__enter__()
