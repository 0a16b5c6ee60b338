"""Tests threads that concurrently allocate in, pause and resume the same tags or different tags."""

import pytest
from looks import held

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C
from memsaver.errors import InvalidStateError

MIB = 1 << 20


def test_threads_that_read_contents_at_once_each_see_their_own(sim, tag, make_blocks, in_thread):
    def differences(block):
        return sum(not block.is_intact() for _ in range(300))

    tasks = [in_thread(differences, block) for block in make_blocks(tag(), [4096, 12288] * 2)]
    assert [task.result() for task in tasks] == [0] * 4


@pytest.mark.parametrize("kind", ["resume", "pause", "failing pause"])
def test_a_region_waits_for_a_transition_and_is_entered_if_the_tag_is_mapped(
    sim, tag, make_blocks, in_thread, wait_until, slow, kind
):
    name = tag()
    blocks = make_blocks(name, [MIB] * 2, backup="host")
    if kind == "resume":
        memsaver.pause(name)
    slow()
    if kind == "failing pause":
        sim.fail("cuMemUnmap", 1)
    task = in_thread(memsaver.resume if kind == "resume" else memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) in ("saving", "restoring"))
    if kind == "pause":
        with pytest.raises(InvalidStateError, match="paused"), memsaver.region(name):
            pytest.fail("entered")
        task.result()
        sim.stream_delay(0)
        memsaver.resume(name)
    else:
        blocks += make_blocks(name, [MIB])
        assert memsaver.state(name) == "mapped"
    if kind == "failing pause":
        with pytest.raises(memsaver.DriverError):
            task.result()
    assert all(b.is_intact() for b in blocks)


def test_memory_in_another_tag_while_one_is_paused_by_another_thread(
    sim, tag, make_blocks, in_thread, wait_until
):
    name, other = tag("slow"), tag("other")
    blocks = make_blocks(name, [MIB], backup="host")
    with held(sim):
        task = in_thread(memsaver.pause, name)
        wait_until(lambda: memsaver.state(name) == "saving")
        with memsaver.region(other):
            mine = simulator.buffer(MIB)
        assert memsaver.state(name) == "saving", "an unrelated allocation waited for the pause"
        memsaver.stats(), memsaver.ranges(name), memsaver.device_memory()
        assert memsaver.state(name) == "saving", "a question waited for the pause"
    task.result()
    memsaver.resume(name)
    assert blocks[0].is_intact() and mine.nbytes == MIB


def test_the_processes_own_tag_while_another_thread_pauses_it(run_python):
    # Without a region, allocations go to MEMSAVER_TAG at any time.
    run_python(
        """
        import threading, time
        import memsaver
        from simulated_driver import Simulator
        from tasks import Task
        from memsaver import simulator
        from memsaver._C import malloc

        sim = Simulator()
        first = simulator.buffer(1 << 20)
        sim.write(first.address, b"kept")
        assert memsaver.state("all") == "mapped"
        sim.stream_delay(0.2)
        task = Task(memsaver.pause, "all")
        while memsaver.state("all") != "saving":
            pass
        try:
            malloc(4096)
        except memsaver.InvalidStateError:
            pass
        else:
            raise AssertionError("memory in a tag that is being paused")
        task.result()
        sim.stream_delay(0)
        memsaver.resume("all")
        assert sim.read(first.address, 4) == b"kept"
        second = simulator.buffer(1 << 20)
        sim.write(second.address, b"new")
        assert not sim.violations()
        """,
        MEMSAVER_TAG="all",
        MEMSAVER_BACKUP="host",
    )


def test_a_pause_waits_for_another_threads_pause(
    sim, tag, make_blocks, in_thread, wait_until, slow
):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    slow()
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    assert memsaver.pause(name).changed == ()
    assert memsaver.state(name) == "paused"
    assert task.result().changed == (name,)
    task = in_thread(memsaver.resume, name)
    wait_until(lambda: memsaver.state(name) == "restoring")
    assert memsaver.resume(name).changed == ()
    assert task.result().changed == (name,)
    assert blocks[0].is_intact()


def test_other_threads_run_while_one_pauses(sim, tag, make_blocks, in_thread, wait_until, slow):
    # The GIL is not held while a pause or a resume waits.
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    slow(0.5)
    for call, during in ((memsaver.pause, "saving"), (memsaver.resume, "restoring")):
        task = in_thread(call, name)
        wait_until(lambda during=during: memsaver.state(name) == during)
        counted = 0
        while memsaver.state(name) == during:
            counted += 1
        task.result()
        assert counted > 100
    assert blocks[0].is_intact()


@pytest.mark.parametrize("fails", [False, True])
def test_each_of_several_running_transitions_has_its_own_result(
    sim, tag, make_blocks, in_thread, wait_until, fails
):
    names = [tag("first"), tag("second")]
    blocks = [make_blocks(name, [MIB], backup="host")[0] for name in names]
    before = sim.calls("cuMemcpyDtoHAsync")
    if fails:
        sim.fail("cuMemcpyDtoHAsync", sim.INVALID_VALUE, nth=2)

    def pause():
        with _C.Reservation(names):
            both = [_C.begin([name], [], -1, []) for name in names]
            _C.Transition.run_all(both)
            for again in ([both[0]], both):
                with pytest.raises(InvalidStateError, match="already run"):
                    _C.Transition.run_all(again)
            return [result_of(one) for one in both]

    def result_of(one):
        try:
            return one.run()
        except memsaver.DriverError as error:
            return error

    with held(sim):
        task = in_thread(pause)
        wait_until(lambda: sim.calls("cuMemcpyDtoHAsync") == before + 2)  # neither has ended
    failed = 0
    for name, block, result in zip(names, blocks, task.result(), strict=True):
        if memsaver.state(name) == "mapped":
            failed += 1
            assert isinstance(result, memsaver.DriverError) and result.tag == name
        else:
            assert [row[:3] for row in result] == [(name, 0, True)]
            memsaver.resume(name)
        assert block.is_intact()
    assert failed == fails


def test_no_transition_runs_if_one_cannot(tag, make_blocks):
    names = [tag("first"), tag("second")]
    blocks = [make_blocks(name, [MIB], backup="host")[0] for name in names]
    first, second = (_C.begin([name], [], -1, []) for name in names)
    with pytest.raises(InvalidStateError, match="twice"):
        _C.Transition.run_all([first, first])
    second.run()
    with pytest.raises(InvalidStateError, match="already run"):
        _C.Transition.run_all([first, second])
    first.run()
    assert [memsaver.state(name) for name in names] == ["paused"] * 2
    memsaver.resume(*names)
    assert all(block.is_intact() for block in blocks)
