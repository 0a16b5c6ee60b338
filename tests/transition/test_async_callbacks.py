"""Tests callbacks of background transitions: the threads that run the callbacks, and the calls that
the callbacks wait for.
"""

import threading
import time

import pytest
from looks import held, intact

import memsaver
from memsaver.errors import InvalidStateError

pytestmark = pytest.mark.each_python

MIB = 1 << 20


def test_callbacks_run_on_the_documented_threads(sim, tag, make_blocks, registered):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    seen = []

    def note(what):
        return lambda t: seen.append((what, threading.current_thread().name, memsaver.state(t)))

    registered += [memsaver.on_pause(note("pause"), name), memsaver.on_resume(note("resume"), name)]
    main = threading.current_thread().name
    memsaver.pause(name, wait=False).wait()
    memsaver.resume(name, wait=False).wait()
    assert seen == [("pause", main, "mapped"), ("resume", "memsaver-resume", "mapped")]
    seen.clear()
    with sim.fault("cuMemUnmap"):
        with pytest.raises(memsaver.DriverError):
            memsaver.pause(name, wait=False).wait()
    assert seen == [("pause", main, "mapped"), ("resume", "memsaver-pause", "mapped")]
    assert intact(blocks)


def test_a_tag_is_taken_until_its_callbacks_are_over(sim, tag, make_paused, registered):
    make_paused(name := tag())
    inside, order = threading.Event(), []

    def slow(t):
        inside.set()
        time.sleep(0.1)
        order.append(memsaver.state(t))

    registered.append(memsaver.on_resume(slow, name))
    under_way = memsaver.resume(name, wait=False)
    assert inside.wait(10)
    memsaver.pause(name)
    order.append("paused")
    assert order == ["mapped", "paused"] and under_way.done()


def test_a_callback_that_raises_in_the_background(sim, tag, make_paused, registered):
    blocks = make_paused(name := tag())

    def fail(t):
        raise LookupError(t)

    registered.append(memsaver.on_resume(fail, name))
    under_way = memsaver.resume(name, wait=False)
    with pytest.raises(LookupError, match=name):
        under_way.wait()
    assert memsaver.state(name) == "mapped" and intact(blocks)
    registered.pop().remove()
    memsaver.pause(name)  # the tag is available again


def test_a_callback_in_the_background_may_start_transitions(
    sim, tag, make_blocks, make_paused, registered
):
    name, other, third = tag("name"), tag("other"), tag("third")
    blocks = make_paused(name) + make_paused(other) + make_blocks(third, [MIB], backup="host")
    started = []

    def more(t):
        registered.pop().remove()
        memsaver.resume(other)
        with memsaver.paused(third):
            pass
        with memsaver.paused(name):  # the callback's own tag
            pass
        started.append(memsaver.pause(other, wait=False))

    registered.append(memsaver.on_resume(more, name))
    memsaver.resume(name, wait=False).wait()
    assert started[0].wait().changed == (other,)
    assert memsaver.state(name) == memsaver.state(third) == "mapped"
    memsaver.resume(other)
    assert intact(blocks)


def test_a_callback_cannot_wait_for_its_own_transition(sim, tag, make_paused, registered):
    blocks = make_paused(name := tag())
    handles, errors = [], []
    ready = threading.Event()

    def wait_for_itself(t):
        ready.wait(10)
        handles[0].wait_stream(0)  # the copies are done: nothing to wait for
        with pytest.raises(InvalidStateError, match="after the callback") as caught:
            handles[0].wait()
        errors.append(caught.value)

    registered.append(memsaver.on_resume(wait_for_itself, name))
    handles.append(memsaver.resume(name, wait=False))
    ready.set()
    handles[0].wait()
    assert len(errors) == 1 and intact(blocks)


def test_two_callbacks_that_want_each_others_tags(sim, tag, make_blocks, registered, in_thread):
    # One of the two calls is rejected; then the other continues.
    names = [tag("first"), tag("second")]
    blocks = [make_blocks(name, [MIB], backup="host")[0] for name in names]
    both = threading.Barrier(2)
    refused = []

    def cross(mine, theirs):
        def callback(t):
            both.wait(10)
            try:
                memsaver.pause(theirs)
            except InvalidStateError as error:
                refused.append((mine, str(error)))

        return memsaver.on_pause(callback, mine)

    registered += [cross(*names), cross(*names[::-1])]
    # The callback of a further pause would wait in the barrier a second time.
    original, registered[:] = list(registered), []
    tasks = [in_thread(memsaver.pause, name) for name in names]
    try:
        both_done = [task.result(20) for task in tasks]
    finally:
        for registration in original:
            registration.remove()
    assert len(both_done) == 2 and len(refused) >= 1
    assert all("waits for this thread" in text for _, text in refused)
    memsaver.resume(*names)
    assert intact(blocks)


def test_a_callback_that_waits_for_a_transition_that_waits_for_it(
    sim, tag, make_blocks, make_paused, registered
):
    # on_pause(first) waits for the resume of the second tag, whose callback pauses the first.
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB], backup="host") + make_paused(second)
    registered.append(memsaver.on_resume(lambda t: memsaver.pause(first), second))
    refused = []

    def callback(t):
        under_way = memsaver.resume(second, wait=False)
        with pytest.raises(InvalidStateError):
            under_way.wait()
            refused.append("its callback")
        refused.append("the wait")

    registered.append(memsaver.on_pause(callback, first))
    memsaver.pause(first)
    assert refused
    assert memsaver.state(first) == "paused" and memsaver.state(second) == "mapped"
    memsaver.resume(first)
    assert intact(blocks)


def test_a_callback_of_a_failed_transition_may_ask_for_it(sim, tag, make_blocks, registered):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    met = []

    def ask(_):
        with pytest.raises(InvalidStateError):
            handle.wait_stream(0)
        met.append("told")

    with sim.fault("cuMemcpyDtoHAsync"):
        with held(sim):
            handle = memsaver.pause(name, wait=False)
            registered.append(memsaver.on_resume(ask, tag=name))
        with pytest.raises(memsaver.MemsaverError):
            handle.wait(20)
    assert met == ["told"] and memsaver.state(name) == "mapped"
    assert intact(blocks)
