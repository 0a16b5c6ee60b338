"""Tests the last transition, and the caller of this transition, in the result of `explain`."""

import contextlib
import inspect
import threading
import time

import pytest

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import DriverError, OutOfDeviceMemoryError

MIB = 1 << 20
PAGE = 2 * MIB


@contextlib.contextmanager
def between():
    """Yield a list that receives the wall-clock times before and after the block."""
    times = [time.time()]
    yield times
    times.append(time.time())


def here():
    """Return the caller's file and line in the form that `explain` reports."""
    frame = inspect.currentframe().f_back
    return f"{__file__}:{frame.f_lineno} in "


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
    """The reported caller and thread belong to the program, not to memsaver's background thread."""
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
    """`explain` still reports the transition that caused the tag's state."""
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
    """If the rollback also fails, the tag stays paused, and the report names the caller."""
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
    """The reported caller is the program's own frame, which contains the block, not a frame inside
    the context manager.
    """
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
    """If there is no Python frame outside memsaver, the report contains only the thread."""
    name = tag()
    (block,) = make_blocks(name, [PAGE])
    memsaver.pause(name)
    memsaver.resume(name)
    thread = []

    def work():
        thread.append(threading.get_native_id())
        _C.begin([name], [], -1, []).run()

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    found = memsaver.explain(block.address)
    assert (found.state, found.caller, found.thread) == ("paused", "", thread[0])
    assert f", by thread {thread[0]};" in str(found)


def test_callers_may_have_names_of_any_kind(sim, tag, make_blocks):
    """Names of files and threads can contain any characters and have any length."""
    name = tag()
    (block,) = make_blocks(name, [PAGE])
    scope = {"memsaver": memsaver, "__name__": "odd"}
    exec(compile(f"memsaver.pause({name!r})", "/\udcff" + "é" * 2000, "exec"), scope)
    found = memsaver.explain(block.address)
    assert found.caller.endswith("é:1 in <module>, thread 'MainThread'")  # the end is kept
    assert 500 < len(found.caller) < 1024


@pytest.mark.long
def test_the_caller_is_not_in_the_distributed_package(run_python, tmp_path):
    """The reported caller is not in `memsaver.distributed`, and a rolled-back pause is not
    reported.
    """
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
