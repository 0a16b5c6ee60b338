"""Test `explain` on the simulated driver: an address's tag, its last transition, the caller."""

import contextlib
import ctypes
import inspect
import threading
import time
import types

import pytest

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError, DriverError, OutOfDeviceMemoryError

MIB = 1 << 20
PAGE = 2 * MIB


@contextlib.contextmanager
def between():
    """Yield a list, which receives the wall-clock times before and after the block."""
    times = [time.time()]
    yield times
    times.append(time.time())


def here():
    """Return the file and line of the caller, as `explain` reports them."""
    frame = inspect.currentframe().f_back
    return f"{__file__}:{frame.f_lineno} in "


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
    """Return a segment as torch describes it; blocks are (offset, size, requested, state)."""
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
    """Fake the segments of torch's allocator, because torch without CUDA has none."""
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
    """If torch raises, for example after losing its context, the rest is still reported."""
    from memsaver._inspection import explanations

    def refuse(required):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(explanations, "torch_pools", refuse)
    name = tag()
    block = make_blocks(name, [PAGE])[0]
    memsaver.pause(name)
    assert memsaver.explain(block.address).state == "paused"


# --- times and callers ----------------------------------------------------------------------------


def test_the_callers_of_a_pause_and_a_resume_are_reported(sim, tag, make_blocks):
    name = tag()
    with between() as made:
        (block,) = make_blocks(name, [PAGE])
    found = memsaver.explain(block.address)
    assert made[0] <= found.since <= made[1]
    assert (found.thread, found.caller) == (threading.get_native_id(), "")

    for change, state in ((memsaver.pause, "paused"), (memsaver.resume, "mapped")):
        with between() as times:
            change(name), (place := here())
        time.sleep(0.02)
        found = memsaver.explain(block.address)
        assert found.state == state
        assert times[0] <= found.since <= times[1]
        assert 0.02 <= found.seconds <= time.time() - times[0]
        assert found.caller.startswith(place) and "'MainThread'" in found.caller
        assert found.thread == threading.get_native_id()
        text = str(found)
        assert repr(name) in text and place in text and state in text
    assert f"memsaver.resume({name!r})" not in text  # it is mapped


def test_each_tag_reports_its_own_thread_and_caller(sim, tag, make_blocks):
    """The report for each tag names its own thread and caller."""
    names = [tag("first"), tag("second")]
    blocks = [make_blocks(name, [PAGE], backup="host")[0] for name in names]
    native = {}

    def work(name):
        native[name] = threading.get_native_id()
        memsaver.pause(name)

    threads = [
        threading.Thread(target=work, args=(name,), name=f"rank {number}")
        for number, name in enumerate(names)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (name, block) in enumerate(zip(names, blocks, strict=True)):
        found = memsaver.explain(block.address)
        assert found.thread == native[name] != threading.get_native_id()
        # Before 3.11, Python has no qualified name for the function.
        assert found.caller.endswith(f"work, thread 'rank {number}'")


def test_a_swap_notifies_callbacks_of_both_sides(sim, tag, make_blocks):
    out, into = tag("out"), tag("into")
    coming = make_blocks(into, [PAGE])[0]
    memsaver.pause(into)
    going = make_blocks(out, [PAGE], backup="host")[0]
    memsaver.swap(out=out, into=into), (place := here())
    left, came = memsaver.explain(going.address), memsaver.explain(coming.address)
    assert (left.state, came.state) == ("paused", "mapped")
    assert left.caller.startswith(place) and came.caller == left.caller
    assert abs(left.since - came.since) < 0.5


def test_pausing_a_paused_tag_changes_nothing(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    block, other = make_blocks(first, [PAGE])[0], make_blocks(second, [PAGE])[0]
    memsaver.pause(first)
    before = memsaver.explain(block.address)
    memsaver.pause(first, second)
    after = memsaver.explain(block.address)
    assert (after.caller, after.since) == (before.caller, before.since)
    assert memsaver.explain(other.address).caller != before.caller


def test_a_transition_in_progress_and_afterwards(sim, tag, make_blocks, wait_until):
    """The reported caller and thread are the program's, not the background thread's."""
    name = tag()
    (block,) = make_blocks(name, [8 * MIB], backup="host")
    sim.copy_rate(40 * MIB)
    for change, during, after in (
        (memsaver.pause, "saving", "paused"),
        (memsaver.resume, "restoring", "mapped"),
    ):
        with between() as begun:
            transition, place = change(name, wait=False), here()
        found = memsaver.explain(block.address)
        assert found.state == during
        assert begun[0] <= found.since <= begun[1]
        assert found.caller.startswith(place) and found.thread == threading.get_native_id()
        assert "before the transition is over" in str(found)
        transition.wait()
        done = memsaver.explain(block.address)
        assert (done.state, done.caller, done.thread) == (after, found.caller, found.thread)
        assert done.since > found.since


def test_a_failed_transition_keeps_the_earlier_one_in_the_report(sim, tag, make_blocks):
    """The transition that caused the tag's state is still reported."""
    name = tag()
    (block,) = make_blocks(name, [PAGE], backup="host")
    before = memsaver.explain(block.address)
    with sim.fault("cuMemUnmap"), pytest.raises(DriverError):
        memsaver.pause(name)
    after = memsaver.explain(block.address)
    assert (after.state, after.since, after.caller) == ("mapped", before.since, "")

    memsaver.pause(name)
    before = memsaver.explain(block.address)
    sim.occupy(memsaver.device_memory(0)[0])
    with pytest.raises(OutOfDeviceMemoryError):
        memsaver.resume(name)
    sim.occupy(0)
    after = memsaver.explain(block.address)
    assert (after.state, after.since, after.caller) == ("paused", before.since, before.caller)


def test_a_pause_that_failed_twice(sim, tag, make_blocks, options):
    """If the rollback fails too, the tag is paused, and the report names the caller."""
    options(share_bytes="2MiB", slab_bytes="2MiB")
    name = tag()
    blocks = make_blocks(name, [PAGE, PAGE])
    sim.fail("cuMemUnmap", sim.LAUNCH_FAILED, 2)
    sim.fail("cuMemMap", sim.LAUNCH_FAILED, 1)
    with pytest.raises(DriverError):
        memsaver.pause(name)
    sim.clear_faults()
    found = memsaver.explain(blocks[0].address)
    assert found.state == "paused" and "test_a_pause_that_failed_twice" in found.caller


def test_the_caller_is_that_of_the_paused_block(sim, tag, make_blocks):
    """The reported caller is the block's, not a frame inside the context manager."""
    name = tag()
    (block,) = make_blocks(name, [PAGE])
    with memsaver.paused(name), contextlib.nullcontext(here()) as place:
        assert memsaver.explain(block.address).caller.startswith(place)
    found = memsaver.explain(block.address)
    assert found.state == "mapped" and found.caller.startswith(f"{__file__}:")
    assert "in test_the_caller_is_that_of_the_paused_block" in found.caller


def test_a_callback_that_pauses(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    make_blocks(first, [PAGE])
    (block,) = make_blocks(second, [PAGE])

    def too(_):
        memsaver.pause(second)

    registration = memsaver.on_pause(too, tag=first)
    try:
        memsaver.pause(first)
    finally:
        registration.remove()
    assert "too, thread" in memsaver.explain(block.address).caller


def test_a_call_outside_of_python(sim, tag, make_blocks):
    """If there is no Python frame outside memsaver, only the thread is reported."""
    name = tag()
    (block,) = make_blocks(name, [PAGE])
    memsaver.pause(name)
    memsaver.resume(name)
    thread = []

    def work():
        thread.append(threading.get_native_id())
        _C.pause([name], -1, [])

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    found = memsaver.explain(block.address)
    assert (found.state, found.caller, found.thread) == ("paused", "", thread[0])
    assert f", by thread {thread[0]};" in str(found)


def test_callers_may_have_names_of_any_kind(sim, tag, make_blocks):
    """Names of files and threads may have any characters and any length."""
    name = tag()
    (block,) = make_blocks(name, [PAGE])
    scope = {"memsaver": memsaver, "__name__": "odd"}
    exec(compile(f"memsaver.pause({name!r})", "/\udcff" + "é" * 2000, "exec"), scope)
    found = memsaver.explain(block.address)
    assert found.caller.endswith("é:1 in <module>, thread 'MainThread'")  # the end is kept
    assert 500 < len(found.caller) < 1024


@pytest.mark.long
def test_the_caller_is_not_in_the_distributed_package(run_python, tmp_path):
    """The reported caller is not in `memsaver.distributed`; a rolled-back pause is not reported."""
    pytest.importorskip("torch")
    done = run_python(f"""
        import memsaver
        import memsaver.distributed as md
        from simulated_driver import Simulator
        from memsaver import simulator
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method="file://{tmp_path}/group", rank=0, world_size=1
        )
        with memsaver.region("kv"):
            block = simulator.buffer(4096)
        made = memsaver.explain(block.address)

        def sleep():
            md.pause("kv")
            return memsaver.explain(block.address)

        def doze():
            with md.paused("kv"):
                return memsaver.explain(block.address)

        with simulator.fault("cuMemUnmap", 1):
            try:
                md.pause("kv")
            except md.RankError:
                assert memsaver.explain(block.address).since == made.since
        found = sleep()
        print(found.state, found.caller.split()[2])
        md.resume("kv")
        found = doze()
        print(found.state, found.caller.split()[2])
        found = memsaver.explain(block.address)
        print(found.state, found.caller.split()[2])
        dist.destroy_process_group()
    """)
    assert done.stdout.split() == ["paused", "sleep,", "paused", "doze,", "mapped", "doze,"]


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
