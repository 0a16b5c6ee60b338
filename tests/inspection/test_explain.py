"""Tests `explain` on the simulated driver: an address's tag, allocation and tensor."""

import contextlib
import ctypes
import types

import pytest

import memsaver
from memsaver.errors import ConfigError

MIB = 1 << 20
PAGE = 2 * MIB


# --- tags and tensors -----------------------------------------------------------------------------


def test_a_foreign_address_has_no_tag(sim, tag, make_blocks):
    make_blocks(tag(), [PAGE])
    local = ctypes.create_string_buffer(10)
    for address in (0, 1, ctypes.addressof(local), (1 << 64) - 1):
        found = memsaver.explain(address)
        assert (found.address, found.tag, found.state, found.allocation) == (address, *[None] * 3)
        assert found.offset == 0
        assert f"{address:#x} is not memsaver's" in str(found)


def test_a_tensor_on_the_cpu():
    torch = pytest.importorskip("torch")
    found = memsaver.explain(torch.ones(3))
    assert found.in_host_memory and "the tensor is on the CPU" in str(found)


@pytest.mark.parametrize("bad", ["0x100", 1.5, None, -1, 1 << 64, object()])
def test_invalid_addresses_are_rejected(sim, tag, bad):
    with pytest.raises(ConfigError):
        memsaver.explain(bad)


def test_the_surrounding_allocation_is_reported(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [512, 3 * PAGE, 1024])
    other = make_blocks(second, [PAGE])[0]
    for block in blocks:
        for offset in (0, block.nbytes // 2, block.nbytes - 1):
            found = memsaver.explain(block.address + offset)
            assert found.tag == first and found.device == 0 and found.state == "mapped"
            assert found.allocation == (block.address, block.nbytes)
            assert found.offset == offset
    assert memsaver.explain(other.address).tag == second


def test_a_tensor_is_explained_by_its_address(sim, tag):
    torch = pytest.importorskip("torch")
    from memsaver import simulator

    name = tag()
    with memsaver.region(name):
        tensor = simulator.empty((8, 1024), torch.int32)
    memsaver.pause(name)
    found = memsaver.explain(tensor[3])
    assert (found.tag, found.state, found.offset) == (name, "paused", 3 * 4096)
    assert memsaver.explain(torch.zeros(4)).tag is None


def test_freed_memory_is_reported_with_its_tag(sim, tag, make_blocks):
    """The tag of freed memory is still reported."""
    name = tag()
    blocks = make_blocks(name, [PAGE, 4096])
    address = blocks[1].address
    memsaver.pause(name)
    del blocks[1]
    found = memsaver.explain(address)
    assert (found.tag, found.allocation, found.state) == (name, None, "paused")
    assert "no live allocation" in str(found) and repr(name) in str(found)


def test_memory_freed_during_a_transition(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [PAGE, PAGE], backup="host")
    address = blocks[1].address
    sim.copy_rate(20 * MIB)
    pause = memsaver.pause(name, wait=False)
    del blocks[1]
    assert memsaver.explain(address).allocation is None
    pause.wait()
    assert memsaver.explain(blocks[0].address).allocation is not None


def segment(address, nbytes, *blocks):
    """Return a segment in torch's format; blocks are (offset, size, requested, state)."""
    return {
        "address": address,
        "total_size": nbytes,
        "blocks": [
            {"address": address + at, "size": size, "requested_size": wanted, "state": state}
            for at, size, wanted, state in blocks
        ],
    }


@pytest.fixture
def torch_segments(monkeypatch):
    """Fake the segments of torch's allocator, because torch without CUDA has no segments."""
    from memsaver._inspection import explanations
    from memsaver._memory import torch_mode

    def use(*segments):
        pools = object.__new__(torch_mode.TorchPools)
        snapshot = types.SimpleNamespace(memory_snapshot=lambda: list(segments))
        pools.torch = types.SimpleNamespace(cuda=snapshot)
        monkeypatch.setattr(explanations, "torch_pools", lambda required: pools)

    return use


def test_the_tensor_where_torch_knows_it(sim, tag, make_blocks, torch_segments):
    name = tag()
    block = make_blocks(name, [PAGE])[0]
    start = block.address
    torch_segments(
        segment(1 << 20, PAGE, (0, PAGE, PAGE, "active_allocated")),
        segment(
            start,
            PAGE,
            (0, 1024, 1000, "active_allocated"),
            (1024, 1024, 1024, "inactive"),
            (2048, PAGE - 2048, PAGE - 2048, "active_allocated"),
        ),
    )
    found = memsaver.explain(start + 999)
    assert found.tensor == (start, 1000) and found.offset == 999
    assert "999 bytes into a tensor of 1000 bytes" in str(found)
    assert memsaver.explain(start + 5000).tensor == (start + 2048, PAGE - 2048)
    assert memsaver.explain(start + 5000).offset == 5000 - 2048
    for nobodys in (1000, 1024, 1500):
        found = memsaver.explain(start + nobodys)
        assert found.in_segment and found.tensor is None and found.offset == nobodys
        assert "no live tensor" in str(found) and "deleted" in str(found)


def test_an_error_of_torch_leaves_the_other_fields_valid(
    sim, tag, make_blocks, torch_segments, monkeypatch
):
    """If torch raises an error, for example without a context, other facts are still reported."""
    from memsaver._inspection import explanations

    def refuse(required):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(explanations, "torch_pools", refuse)
    name = tag()
    block = make_blocks(name, [PAGE])[0]
    memsaver.pause(name)
    assert memsaver.explain(block.address).state == "paused"


# --- while other calls would wait or fail ---------------------------------------------------------


def test_it_makes_no_driver_call_and_waits_for_nobody(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [PAGE], backup="host")
    sim.hold_streams(True)  # the pause cannot continue
    pause = memsaver.pause(name, wait=False)
    sim.deinitialize(True)
    try:
        assert memsaver.explain(block.address).tag == name
    finally:
        sim.deinitialize(False)
        sim.hold_streams(False)
    with contextlib.suppress(memsaver.MemsaverError):
        pause.wait()


def test_explain_works_after_an_illegal_access(run_python):
    """`explain` works after an access to unmapped memory has destroyed the context."""
    done = run_python("""
        import ctypes, os
        import memsaver
        from simulated_driver import Simulator
        from memsaver import simulator

        sim = Simulator()
        sim.opened.cuMemUnmap.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
        with memsaver.region("kv"):
            block = simulator.buffer(2 << 20)
        with sim.stream() as stream:
            sim.hold_streams(True)
            sim.memset(block.address, 1, 4096, stream)
            assert sim.opened.cuMemUnmap(block.address, 2 << 20) == 0
            sim.hold_streams(False)
            assert sim.opened.cuStreamSynchronize(stream) == 700
            try:
                memsaver.pause("kv")
            except memsaver.DriverError as error:
                assert error.cuda_error == 700, error
            else:
                raise AssertionError("the context lives")
            found = memsaver.explain(block.address + 5)
            print(found.tag, found.state, found.offset, flush=True)
            os._exit(0)
    """)
    assert done.stdout.split() == ["kv", "mapped", "5"]
