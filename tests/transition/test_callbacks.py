"""Tests callbacks of pauses and resumes: the callbacks' times, arguments, threads and failures."""

import dataclasses
import gc
import threading
import time
import warnings
import weakref
from typing import ClassVar

import pytest

import memsaver
from memsaver._transitions import observers
from memsaver.errors import InvalidStateError, UnknownTagError

pytestmark = pytest.mark.each_python

MIB = 1 << 20
PAGE = 2 * MIB


# --- callbacks ------------------------------------------------------------------------------------


@pytest.fixture
def events():
    """Yield a list of callbacks' events, with methods that register callbacks for the test."""

    class Events(list):
        registered: ClassVar[list] = []

        def on(self, function, *arguments):
            self.registered.append(function(*arguments))
            return self.registered[-1]

        def note(self, what):
            return lambda tag: self.append((what, tag, str(memsaver.state(tag))))

    events = Events()
    yield events
    for registration in events.registered:
        registration.remove()
    events.registered.clear()


def test_a_collection_at_any_moment_may_remove_a_callback(sim, tag, in_thread):
    # A finalizer can run on any thread between any two steps, even those of a registration.
    name = tag()
    with memsaver.region(name):
        pass

    class Owner:
        def __init__(self):
            self.me = self  # so that only the collector frees it

    def register():
        owner = Owner()
        registration = memsaver.on_pause(lambda tag: None, tag=name)
        weakref.finalize(owner, registration.remove)

    class Collecting(str):
        def __eq__(self, other):
            gc.collect()
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    last = memsaver.on_pause(lambda tag: None, tag=Collecting(name))
    register()

    def work():
        with memsaver.paused(name):
            pass

    in_thread(work).result(10)
    work()
    assert len([one for one in observers._before_pause if one.concerns(name)]) == 1
    last.remove()
    last.remove()
    assert not any(one.concerns(name) for one in observers._before_pause)


def test_callbacks_see_the_tag_while_it_is_mapped(sim, tag, make_blocks, events):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB]) + make_blocks(second, [MIB])
    events.on(memsaver.on_pause, events.note("pause 1"))
    events.on(memsaver.on_pause, events.note("pause 2"))
    events.on(memsaver.on_resume, events.note("resume 1"))
    events.on(memsaver.on_resume, events.note("resume 2"))
    memsaver.pause(first, second)
    assert events == [
        ("pause 1", first, "mapped"),
        ("pause 2", first, "mapped"),
        ("pause 1", second, "mapped"),
        ("pause 2", second, "mapped"),
    ]
    events.clear()
    memsaver.resume(second, first)
    assert events == [
        ("resume 1", second, "mapped"),
        ("resume 2", second, "mapped"),
        ("resume 1", first, "mapped"),
        ("resume 2", first, "mapped"),
    ]
    assert len(blocks) == 2


def test_callbacks_run_only_for_tags_that_change(sim, tag, make_blocks, events):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB]) + make_blocks(second, [MIB])
    memsaver.pause(first)
    events.on(memsaver.on_pause, events.note("pause"))
    events.on(memsaver.on_resume, events.note("resume"))
    memsaver.pause(first, second)
    assert [(what, name) for what, name, _ in events] == [("pause", second)]
    memsaver.pause(first, second)
    assert len(events) == 1
    memsaver.resume(first)
    memsaver.resume(first)
    assert [(what, name) for what, name, _ in events[1:]] == [("resume", first)]
    assert len(blocks) == 2


def test_a_callback_for_one_tag_and_its_removal(sim, tag, make_blocks, events):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB]) + make_blocks(second, [MIB])
    one = events.on(memsaver.on_pause, events.note("one"), second)
    events.on(memsaver.on_pause, events.note("all"))
    memsaver.pause(first, second)
    assert [(what, name) for what, name, _ in events] == [
        ("all", first),
        ("one", second),
        ("all", second),
    ]
    memsaver.resume(first, second)
    one.remove()
    one.remove()
    events.clear()
    memsaver.pause(first, second)
    assert [what for what, _, _ in events] == ["all", "all"]
    assert len(blocks) == 2


def test_callbacks_can_be_decorators(sim, tag, make_blocks, events):
    name = tag()
    blocks = make_blocks(name, [MIB])
    seen = []

    @memsaver.on_pause
    def before(tag):
        seen.append(("before", tag))
        return 42

    @memsaver.on_resume
    def after(tag):
        seen.append(("after", tag))

    events.registered += [before, after]
    with memsaver.paused(name):
        pass
    assert seen == [("before", name), ("after", name)]
    assert before("by hand") == 42
    assert len(blocks) == 1


@pytest.mark.parametrize("register", [memsaver.on_pause, memsaver.on_resume])
def test_invalid_callbacks_are_rejected_at_once(sim, tag, make_blocks, register):
    name = tag()
    blocks = make_blocks(name, [PAGE])
    for wrong in (5, None, "f"):
        with pytest.raises(memsaver.ConfigError, match="a callback must be a function"):
            register(wrong)
    for wrong in (5, "", ["t"]):
        with pytest.raises(memsaver.ConfigError, match="tag"):
            register(print, wrong)
    memsaver.pause(name)  # no callback was registered
    memsaver.resume(name)
    assert len(blocks) == 1


def test_a_callback_may_call_memsaver(sim, tag, make_blocks, events):
    name, other = tag("name"), tag("other")
    blocks = make_blocks(name, [MIB], backup="host") + make_blocks(other, [MIB], backup="host")
    seen = []
    events.on(memsaver.on_pause, lambda t: seen.append(memsaver.ranges(t)), name)
    events.on(memsaver.on_pause, lambda t: memsaver.pause(other), name)
    events.on(memsaver.on_resume, lambda t: memsaver.resume(other), name)
    memsaver.pause(name)
    assert memsaver.state(other) == "paused"
    memsaver.resume(name)
    assert memsaver.state(other) == "mapped"
    assert seen == [memsaver.ranges(name)]
    assert all(b.is_intact() for b in blocks)


@pytest.mark.parametrize(
    "nested", [memsaver.pause, memsaver.resume, lambda t: memsaver.paused(t).__enter__()]
)
def test_no_transition_of_a_tag_begins_while_its_pause_is_announced(
    sim, tag, make_blocks, events, nested
):
    # In a finalizer, the call could happen at any moment and callbacks would receive a wrong state.
    (block,) = make_blocks(name := tag(), [MIB], backup="host")

    def refused(_):
        with pytest.raises(InvalidStateError, match=f"{name}.* after the callback"):
            nested(name)
        events.append("refused")

    events.on(memsaver.on_pause, refused, name)
    events.on(memsaver.on_pause, events.note("pause"), name)
    events.on(memsaver.on_resume, events.note("resume"), name)
    memsaver.pause(name)
    assert events == ["refused", ("pause", name, "mapped")]
    memsaver.resume(name)
    assert events[2:] == [("resume", name, "mapped")] and block.is_intact()


@pytest.mark.parametrize(
    "resume", [memsaver.resume, lambda t: memsaver.resume(t, wait=False).wait()]
)
def test_a_resume_is_not_announced_once_a_callback_has_paused_the_tag(
    sim, tag, make_blocks, events, resume
):
    (block,) = make_blocks(name := tag(), [MIB], backup="host")
    memsaver.pause(name)
    first = events.on(memsaver.on_resume, lambda t: (first.remove(), memsaver.pause(t)), name)
    events.on(memsaver.on_pause, events.note("pause"), name)
    events.on(memsaver.on_resume, events.note("resume"), name)
    resume(name)
    assert memsaver.state(name) == "paused" and events == [("pause", name, "mapped")]
    memsaver.resume(name)
    assert events[1:] == [("resume", name, "mapped")] and block.is_intact()


def test_a_callback_that_raises_prevents_the_pause(sim, tag, make_blocks, events):
    names = [tag("first"), tag("second"), tag("third")]
    blocks = [make_blocks(name, [MIB], backup="host")[0] for name in names]

    def refuse(tag):
        raise LookupError("not now")

    events.on(memsaver.on_pause, events.note("pause"))
    events.on(memsaver.on_pause, refuse, names[1])
    events.on(memsaver.on_resume, events.note("resume"))
    with pytest.raises(LookupError, match="not now"):
        memsaver.pause(*names)
    assert all(memsaver.state(name) == "mapped" for name in names)
    assert all(b.is_intact() for b in blocks)
    told = [(what, name) for what, name, _ in events]
    assert ("pause", names[2]) not in told and ("resume", names[2]) not in told
    for name in names[:2]:
        assert told.count(("pause", name)) == told.count(("resume", name)) == 1


@pytest.mark.parametrize("registering", [memsaver.on_pause, memsaver.on_resume])
def test_an_error_of_a_callback_names_the_callback_and_the_tag(
    sim, tag, make_blocks, events, registering
):
    make_blocks(name := tag(), [MIB], backup="host")

    def unregister_memory(tag):
        raise LookupError("not now")

    events.on(registering, unregister_memory)
    with pytest.raises(LookupError, match="not now") as caught:
        with memsaver.paused(name):
            pass
    notes = "".join(caught.value.__notes__)
    assert registering.__name__ in notes and repr(name) in notes
    assert "test_callbacks" in notes and "unregister_memory" in notes


def test_a_callback_that_raises_after_a_resume(sim, tag, make_blocks, events):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB], backup="host") + make_blocks(second, [MIB], backup="host")
    memsaver.pause(first, second)

    def fail(tag):
        raise LookupError(tag)

    events.on(memsaver.on_resume, fail)
    events.on(memsaver.on_resume, events.note("resume"))
    with pytest.raises(LookupError, match=first):
        memsaver.resume(first, second)
    assert [(what, name) for what, name, _ in events] == [("resume", first), ("resume", second)]
    assert memsaver.state(first) == memsaver.state(second) == "mapped"
    assert all(b.is_intact() for b in blocks)


def test_a_failed_pause_notifies_all_and_raises_its_own_error(sim, tag, make_blocks, events):
    # Even if a callback fails in addition to the pause.
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB]) + make_blocks(second, [MIB])

    def fail(tag):
        raise LookupError(tag)

    events.on(memsaver.on_resume, fail)
    events.on(memsaver.on_resume, events.note("resume"))
    with sim.fault("cuMemUnmap"):
        with pytest.raises(memsaver.DriverError):
            memsaver.pause(first, second)
    assert [(what, name) for what, name, _ in events] == [("resume", first), ("resume", second)]
    assert len(blocks) == 2


def test_a_callbacks_exit_after_a_failed_pause_follows_the_other_callbacks(
    sim, tag, make_blocks, events
):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB]) + make_blocks(second, [MIB])

    def leave(tag):
        raise SystemExit(tag)

    events.on(memsaver.on_resume, leave, first)
    events.on(memsaver.on_resume, events.note("resume"))
    with sim.fault("cuMemUnmap"), pytest.raises(SystemExit) as caught:
        memsaver.pause(first, second)
    assert isinstance(caught.value.__cause__, memsaver.DriverError)
    assert [name for _, name, _ in events] == [first, second] and len(blocks) == 2


@pytest.mark.parametrize(
    "pause",
    [
        memsaver.pause,
        lambda name: memsaver.pause(name, progress=lambda done, total: None),
        lambda name: memsaver.pause(name, wait=False).wait(),
    ],
    ids=["pause", "progress", "background"],
)
def test_warnings_that_are_errors_do_not_replace_a_pauses_error(
    sim, tag, make_blocks, events, pause
):
    name = tag()
    blocks = make_blocks(name, [MIB])
    events.on(memsaver.on_resume, lambda tag: 1 / 0)
    events.on(memsaver.on_resume, events.note("resume"))
    with warnings.catch_warnings(), sim.fault("cuMemUnmap"):
        warnings.simplefilter("error")
        with pytest.raises(memsaver.DriverError):
            pause(name)
    assert [what for what, _, _ in events] == ["resume"] and blocks


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


def test_an_error_that_accepts_no_note_is_raised_unchanged(sim, tag, make_blocks, events):
    name = tag()
    blocks = make_blocks(name, [MIB])

    def fail(tag):
        raise FrozenError(7)

    events.on(memsaver.on_resume, fail)
    events.on(memsaver.on_resume, events.note("resume"))
    memsaver.pause(name)
    with pytest.raises(FrozenError):
        memsaver.resume(name)
    assert [what for what, _, _ in events] == ["resume"] and blocks


def test_a_failed_resume_announces_nothing(sim, tag, make_blocks, events):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    memsaver.pause(name)
    events.on(memsaver.on_resume, events.note("resume"))
    with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
        with pytest.raises(memsaver.OutOfDeviceMemoryError):
            memsaver.resume(name)
    assert events == []
    memsaver.resume(name)
    assert [what for what, _, _ in events] == ["resume"]
    assert blocks[0].is_intact()


def test_an_unknown_tag_is_an_error_before_any_callback(sim, tag, make_blocks, events):
    name, unknown = tag("known"), tag("unknown")
    blocks = make_blocks(name, [MIB])
    events.on(memsaver.on_pause, events.note("pause"))
    with pytest.raises(UnknownTagError):
        memsaver.pause(name, unknown)
    assert events == []
    assert blocks[0].is_intact()


def test_a_pause_of_a_tag_that_is_being_resumed_is_announced(
    sim, tag, make_blocks, events, in_thread, wait_until, slow
):
    # Callbacks for registered pages must run for every pause.
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    memsaver.pause(name)
    events.on(memsaver.on_pause, lambda t: events.append("pause"), name)
    events.on(memsaver.on_resume, lambda t: events.append("resume"), name)
    slow()
    task = in_thread(memsaver.resume, name)
    wait_until(lambda: memsaver.state(name) == "restoring")
    report = memsaver.pause(name)
    task.result()
    assert report.changed == (name,)
    assert sorted(events) == ["pause", "resume"]
    sim.stream_delay(0)
    memsaver.resume(name)
    assert blocks[0].is_intact()


def test_callbacks_run_on_the_calling_thread_without_a_lock(
    sim, tag, make_blocks, events, in_thread
):
    # A callback that waits for another thread, which uses the same tag, must not deadlock.
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    threads = []

    def callback(tag):
        threads.append(threading.current_thread())
        more = in_thread(make_blocks, tag, [MIB]).result(timeout=10)
        assert memsaver.state(tag) == "mapped"
        more.clear()

    events.on(memsaver.on_pause, callback)
    events.on(memsaver.on_resume, callback)
    memsaver.pause(name)
    memsaver.resume(name)
    assert threads == [threading.current_thread()] * 2
    assert blocks[0].is_intact()


def test_callbacks_that_pause_further_tags_do_not_wait_for_each_other(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    for name in (first, second):
        make_blocks(name, [PAGE])
    inside, errors = threading.Event(), []

    def pause_the_other(_):
        inside.set()
        time.sleep(0.1)
        try:
            memsaver.pause(first)
        except InvalidStateError as error:
            errors.append(error)

    registered = memsaver.on_pause(pause_the_other, second)
    both = threading.Thread(target=lambda: (inside.wait(), memsaver.pause(first, second)))
    both.start()
    try:
        memsaver.pause(second)
    finally:
        registered.remove()
        both.join(20)
    assert not both.is_alive()
    assert memsaver.state(first) == memsaver.state(second) == "paused"
    memsaver.resume(first, second)
