"""Tests regions: the tag that new memory belongs to, and the errors of a region."""

import threading

import pytest
from region_memory import buffer_in, owned

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C, note
from memsaver.errors import InvalidStateError, OutOfDeviceMemoryError

pytestmark = pytest.mark.each_python

MIB = 1 << 20


# --- tags of allocations --------------------------------------------------------------------------


def test_memory_outside_every_region_is_refused(sim):
    with pytest.raises(InvalidStateError, match="in no region"):
        simulator.buffer(4096)


def test_the_innermost_region_counts(sim, tag):
    outer, inner = tag("outer"), tag("inner")
    with memsaver.region(outer):
        first = simulator.buffer(4096)
        with memsaver.region(inner):
            second = simulator.buffer(4096)
        third = simulator.buffer(4096)
    assert set(owned(outer)) == {first.address, third.address}
    assert owned(inner) == [second.address]


def test_a_region_of_the_same_tag_inside_itself(sim, tag):
    name = tag()
    with memsaver.region(name):
        with memsaver.region(name):
            first = simulator.buffer(4096)
        second = simulator.buffer(4096)
        with pytest.raises(InvalidStateError):
            memsaver.pause(name)
    assert set(owned(name)) == {first.address, second.address}
    memsaver.pause(name)
    memsaver.resume(name)


def test_a_decorated_function_is_a_region(sim, tag):
    name = tag()

    @memsaver.region(name, backup="host")
    def build(nbytes):
        """Docstring."""
        return simulator.buffer(nbytes)

    first, second = build(4096), build(nbytes=8192)
    assert build.__name__ == "build" and build.__doc__ == "Docstring."
    assert set(owned(name)) == {first.address, second.address}
    assert _C.region_depth() == 0
    assert memsaver.stats()[name][0].backup == "host"


def test_a_decorated_function_may_recurse(sim, tag):
    name = tag()

    @memsaver.region(name)
    def build(depth):
        deepest.append(_C.region_depth())
        mine = [simulator.buffer(4096)]
        return mine + (build(depth - 1) if depth else [])

    deepest = []
    blocks = build(20)
    assert max(deepest) == 21
    assert sorted(owned(name)) == sorted(b.address for b in blocks)
    assert _C.region_depth() == 0


def test_a_decorated_function_that_raises_leaves_its_region(sim, tag):
    @memsaver.region(tag())
    def build():
        raise LookupError("mine")

    for _ in range(3):
        with pytest.raises(LookupError, match="mine"):
            build()
    assert _C.region_depth() == 0


def test_a_decorated_function_on_many_threads(sim, tag, in_thread):
    name = tag()

    @memsaver.region(name)
    def build():
        together.wait()
        return simulator.buffer(4096)

    together = threading.Barrier(8)
    blocks = [task.result() for task in [in_thread(build) for _ in range(8)]]
    assert sorted(owned(name)) == sorted(b.address for b in blocks)


def test_an_instance_may_be_used_again(sim, tag):
    name = tag()
    region = memsaver.region(name)
    blocks = []
    for _ in range(3):
        with region:
            blocks.append(simulator.buffer(4096))
    with region, region:
        blocks.append(simulator.buffer(4096))
    assert _C.region_depth() == 0
    assert sorted(owned(name)) == sorted(b.address for b in blocks)
    memsaver.pause(name)
    memsaver.resume(name)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_leaves_every_region(sim, tag, error):
    outer, inner = tag("outer"), tag("inner")
    with pytest.raises(error):
        with memsaver.region(outer), memsaver.region(inner), memsaver.disabled():
            raise error
    assert _C.region_depth() == 0
    memsaver.pause(outer, inner)
    memsaver.resume(outer, inner)


def test_a_failed_allocation_leaves_the_region_usable(sim, tag):
    name = tag()
    with memsaver.region(name):
        with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY, times=0):
            with pytest.raises(OutOfDeviceMemoryError):
                simulator.buffer(4096)
        assert memsaver.ranges(name) == ()
        block = simulator.buffer(4096)
    assert owned(name) == [block.address]


def test_leaving_a_region_that_was_not_entered(sim, tag):
    with pytest.raises(InvalidStateError, match="in no region"):
        _C.region_exit()
    with pytest.raises(InvalidStateError):
        memsaver.region(tag()).__exit__(None, None, None)
    assert _C.region_depth() == 0


# --- threads --------------------------------------------------------------------------------------


def test_a_region_concerns_its_own_thread_only(sim, tag, in_thread):
    mine, theirs = tag("mine"), tag("theirs")

    def other():
        with pytest.raises(InvalidStateError, match="in no region"):
            simulator.buffer(4096)
        with memsaver.region(theirs):
            return simulator.buffer(4096)

    with memsaver.region(mine):
        foreign = in_thread(other).result()
        block = simulator.buffer(4096)
    assert owned(mine) == [block.address]
    assert owned(theirs) == [foreign.address]


def test_a_thread_that_ends_inside_a_region_leaves_it(sim, tag, in_thread, wait_until):
    name = tag()

    def is_paused():
        try:
            return memsaver.pause(name).changed == (name,)
        except InvalidStateError:  # join() may return shortly before the thread has ended
            return False

    in_thread(lambda: (_C.region_enter(name, -1), _C.region_enter(name, -1))).result()
    wait_until(is_paused)
    memsaver.resume(name)


def test_an_open_region_on_another_thread_prevents_a_pause(sim, tag, in_thread):
    name = tag()
    block = buffer_in(name)
    sim.write(block.address, b"here")
    entered, leave = threading.Event(), threading.Event()

    def other():
        with memsaver.region(name):
            entered.set()
            assert leave.wait(10)

    task = in_thread(other)
    assert entered.wait(10)
    with pytest.raises(InvalidStateError, match="while a region of it is open") as caught:
        memsaver.pause(name)
    assert caught.value.tag == name
    assert memsaver.state(name) == "mapped"
    assert sim.read(block.address, 4) == b"here"
    leave.set()
    task.result()
    memsaver.pause(name)


# --- paused tags ----------------------------------------------------------------------------------


def test_a_region_of_a_paused_tag_is_rejected_and_nothing_changes(sim, tag):
    name = tag()
    block = buffer_in(name, backup="host")
    sim.write(block.address, b"kept")
    memsaver.pause(name)
    before = memsaver.stats()[name]
    for backup in (None, "none", "host"):
        with pytest.raises(InvalidStateError, match="paused") as caught:
            with memsaver.region(name, backup=backup):
                pytest.fail("entered")
        assert caught.value.tag == name
        assert "resume" in str(caught.value)
    assert _C.region_depth() == 0
    assert memsaver.stats()[name] == before
    memsaver.resume(name)
    assert sim.read(block.address, 4) == b"kept"


def test_a_refused_region_leaves_the_one_around_it_open(sim, tag):
    outer, paused = tag("outer"), tag("paused")
    buffer_in(paused)
    memsaver.pause(paused)
    with memsaver.region(outer):
        with pytest.raises(InvalidStateError):
            with memsaver.region(paused):
                pytest.fail("entered")
        block = simulator.buffer(4096)
    assert owned(outer) == [block.address]


@pytest.mark.parametrize("value", ["no", 1, None])
def test_shareable_must_be_a_bool(sim, tag, value):
    with pytest.raises(memsaver.ConfigError, match="True or False"):
        memsaver.region(tag("w"), shareable=value)


def test_a_pause_inside_its_own_region_is_refused(sim, tag):
    name, other = tag("inside"), tag("other")
    kept = buffer_in(other, backup="host")
    sim.write(kept.address, b"kept")
    with memsaver.region(name, backup="host"):
        block = simulator.buffer(4096)
        sim.write(block.address, b"here")
        for tags in [(name,), (other, name), ()]:
            with pytest.raises(InvalidStateError, match="region"):
                memsaver.pause(*tags)
            assert memsaver.state(name) == memsaver.state(other) == "mapped"
        assert sim.read(block.address, 4) == b"here"
        assert sim.read(kept.address, 4) == b"kept"
        memsaver.pause(other)  # another tag may be paused
    memsaver.resume(other)
    assert sim.read(kept.address, 4) == b"kept"


def test_memory_can_be_made_in_another_tag_while_one_is_paused(sim, tag):
    paused, other = tag("paused"), tag("other")
    first = buffer_in(paused, 4 * MIB, backup="host")
    sim.write(first.address, b"kept")
    memsaver.pause(paused)
    second = buffer_in(other, 4 * MIB)
    assert not (first.address <= second.address < first.address + 4 * MIB)
    memsaver.resume(paused)
    assert sim.read(first.address, 4) == b"kept"


# --- disabled -------------------------------------------------------------------------------------


def test_disabled_suspends_the_regions_around_it(sim, tag):
    outer, inner = tag("outer"), tag("inner")
    with memsaver.region(outer):
        with memsaver.disabled():
            assert _C.region_tag() is None
            with pytest.raises(InvalidStateError):
                simulator.buffer(4096)  # simulated memory needs a region
            with memsaver.region(inner):
                first = simulator.buffer(4096)
                with memsaver.disabled(), memsaver.disabled():
                    assert _C.region_tag() is None
                second = simulator.buffer(4096)
        third = simulator.buffer(4096)
    assert set(owned(inner)) == {first.address, second.address}
    assert owned(outer) == [third.address]
    assert _C.region_depth() == 0


def test_disabled_does_not_close_the_region_around_it(sim, tag):
    name = tag()
    with memsaver.region(name), memsaver.disabled():
        with pytest.raises(InvalidStateError, match="region"):
            memsaver.pause(name)


def test_disabled_outside_every_region(sim):
    with memsaver.disabled():
        assert _C.region_tag() is None
    assert _C.region_depth() == 0


# --- importing ------------------------------------------------------------------------------------


def test_working_without_torch_and_numpy(run_python):
    # All calls except those that create tensors.
    run_python(
        """
        import sys
        sys.modules["torch"] = sys.modules["numpy"] = None  # importing them fails
        import memsaver
        from memsaver import simulator

        with memsaver.region("t", backup="host"):
            block = simulator.buffer(4096)
        with memsaver.paused("t"):
            try:
                memsaver.backup_view(block)
            except memsaver.NotLoadedError as error:
                assert "torch" in str(error)
            else:
                raise AssertionError("backup_view without torch")
        memsaver.trim(wait=True), memsaver.stats(), memsaver.ranges("t")
        """
    )


# --- streams bound to a tag -----------------------------------------------------------------------


def test_a_bound_stream_counts_as_an_open_region(sim, tag):
    name = tag()
    stream = 0x5EED
    _C.stream_bind(stream, name, -1)
    try:
        with pytest.raises(InvalidStateError, match="region"):
            memsaver.pause(name)
    finally:
        _C.stream_unbind(stream)
    memsaver.pause(name)
    with pytest.raises(InvalidStateError, match="paused"):
        _C.stream_bind(stream, name, -1)
    memsaver.resume(name)
    with pytest.raises(InvalidStateError, match="bound to no tag"):
        _C.stream_unbind(stream)


def test_binding_a_stream_again_moves_it(sim, tag):
    first, second = tag("first"), tag("second")
    stream = 0x5EED
    _C.stream_bind(stream, first, -1)
    _C.stream_bind(stream, second, -1)
    memsaver.pause(first)
    with pytest.raises(InvalidStateError):
        memsaver.pause(second)
    _C.stream_unbind(stream)
    memsaver.pause(second)


# --- leaving in another order, running later ------------------------------------------------------


def test_regions_are_left_innermost_first(sim, tag):
    outer, inner = memsaver.region(tag("outer")), memsaver.region(tag("inner"))
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(InvalidStateError, match="not the innermost"):
        outer.__exit__(None, None, None)
    assert _C.region_tag() == inner.tag
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert _C.region_depth() == 0


def test_disabled_sections_are_left_in_order_too(sim, tag, in_thread):
    name = tag()
    outer, inner = memsaver.region(name), memsaver.disabled()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(InvalidStateError, match="not the innermost"):
        outer.__exit__(None, None, None)
    with pytest.raises(InvalidStateError, match="disabled section"):
        in_thread(inner.__exit__, None, None, None).result()
    assert _C.region_tag() is None and _C.region_depth() == 2
    inner.__exit__(None, None, None)
    assert _C.region_tag() == name
    with pytest.raises(InvalidStateError, match="disabled section"):
        inner.__exit__(None, None, None)
    assert _C.region_tag() == name
    outer.__exit__(None, None, None)
    assert _C.region_depth() == 0


def test_a_warning_at_a_regions_end_is_of_the_line_that_leaves_it(sim, tag):
    with pytest.warns(memsaver.PerformanceWarning) as caught:
        with memsaver.region(tag()):
            note("slow", memsaver.PerformanceWarning)
    assert [warning.filename for warning in caught] == [__file__]
