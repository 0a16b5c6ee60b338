"""Tests that every wait for a tag ends and never blocks the thread that would end the wait."""

import pytest

pytestmark = pytest.mark.each_python

SETUP = """
    import faulthandler, gc, os, signal, sys, threading, time
    import memsaver
    from memsaver.errors import InvalidStateError
    from memsaver._runtime.native import _C
    from simulated_driver import Block, Simulator

    faulthandler.dump_traceback_later(40, exit=True)
    sim = Simulator()

    def block_in(tag):
        with memsaver.region(tag, backup="host"):
            return Block(sim, 4796, 1)

    blocks = {tag: block_in(tag) for tag in "ab"}

    def refused(call):
        try:
            call()
        except InvalidStateError as error:
            assert "for ever" in str(error) and "'a'" in str(error), error
            return True
        return False
"""

# A transition through the C interface, which the thread that began it hands over.
HANDED_OVER = (
    SETUP
    + """
    from ctypes import CDLL, byref, c_char_p, c_size_t, c_void_p
    from memsaver._runtime.native import LIBRARY_DIR

    lib = CDLL(str(LIBRARY_DIR / "libmemsaver.so"))
    begun, names = c_void_p(), (c_char_p * 1)(b"a")
    no_ranges = None, c_size_t(0), None
    assert lib.ms_pause_begin(names, c_size_t(1), -1, *no_ranges, byref(begun), None) == 0
    assert lib.ms_transition_hand_over(begun, None) == 0
"""
)

# Calls by a thread that has begun a transition but not run it, for example in a signal handler.
REQUESTS = {
    "pause": "lambda: memsaver.pause('a')",
    "resume": "lambda: memsaver.resume('a')",
    "swap": "lambda: memsaver.swap(out='a', into='b')",
    "paused": "lambda: memsaver.paused('a').__enter__()",
    "background": "lambda: memsaver.pause('a', wait=False)",
    "every tag": "memsaver.pause",
    "region": "lambda: memsaver.region('a').__enter__()",
    "C pause": "lambda: _C.begin(['a'], [], -1, [])",
    "C resume": "lambda: _C.begin([], ['a'], -1, [])",
    "C reservation": "lambda: _C.Reservation(['a']).take()",
    "C stream": "lambda: _C.stream_bind(5, 'a', -1)",
    "C view": "lambda: _C.backup_view(blocks['a'].address, 8)",
    "C wait on a stream": "lambda: begun.wait_stream(0)",
}


def test_a_thread_never_waits_for_the_transition_that_it_has_begun(run_python):
    run_python(
        SETUP
        + f"""
    for name, request in {REQUESTS!r}.items():
        for begin in (lambda: _C.begin(["a"], [], -1, []), lambda: _C.begin([], ["a"], -1, [])):
            begun = begin()
            came = []
            signal.signal(signal.SIGUSR1, lambda *_: came.append(refused(eval(request))))
            signal.raise_signal(signal.SIGUSR1)
            assert came == [True], (name, came)
            begun.run()
            assert _C.region_depth() == 0, name
        states = memsaver.state("a"), memsaver.state("b")
        assert blocks["a"].is_intact() and states == ("mapped", "mapped"), name
    """
    )


def test_a_stream_does_not_wait_for_a_transition_that_changes_nothing(run_python):
    run_python(
        SETUP
        + """
    memsaver.pause("a")
    for out, into in ((["a"], []), ([], ["b"])):  # a paused tag, and a mapped one
        begun = _C.begin(out, into, -1, [])
        begun.wait_stream(0)
        begun.run()
        begun.wait_stream(0)
    """,
        timeout=20,
    )


def test_a_handler_that_comes_while_an_engines_ranks_wait_runs_after_the_pause(run_python):
    run_python(
        SETUP
        + """
    from memsaver.integrations.engine import moves
    from memsaver.integrations.engine.ranks import Group

    class Alone(Group):
        def attempt(self, work):
            signal.raise_signal(signal.SIGUSR1)
            return super().attempt(work)

    moves.names_of = lambda tag: [tag]
    states = []

    def handler(*_):
        states.append(str(memsaver.state("a")))
        memsaver.resume("a")

    signal.signal(signal.SIGUSR1, handler)
    moves.pause(Alone(None), ["a"])
    assert states == ["paused"] and memsaver.state("a") == "mapped", states
    assert blocks["a"].is_intact()
    """
    )


def test_memory_is_freed_by_a_thread_that_has_begun_a_transition(run_python):
    run_python(
        SETUP
        + """
    with memsaver.region("c"):
        address = _C.malloc(4096)
    begun = _C.begin(["c"], [], -1, [])
    _C.free(address)
    begun.run()
    memsaver.resume("c")
    rows = [row for row in memsaver.stats().tags if row.tag == "c"]
    assert [row.allocated_bytes for row in rows] == [0], rows
    """
    )


def test_another_thread_waits_for_a_transition_that_was_begun(run_python):
    run_python(
        SETUP
        + """
    begun = _C.begin(["a"], [], -1, [])
    thread = threading.Thread(target=memsaver.resume, args=["a"], daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    begun.run()
    thread.join(20)
    assert not thread.is_alive() and memsaver.state("a") == "mapped"
    """
    )


def test_the_former_owner_waits_for_a_handed_over_transition(run_python):
    run_python(
        HANDED_OVER
        + """
    statuses = []
    run = lambda: statuses.append(lib.ms_transition_run(begun, None, None, None))
    timer = threading.Timer(0.2, run)
    timer.start()
    memsaver.resume("a")
    timer.join()
    lib.ms_transition_free(begun)
    assert statuses == [0] and memsaver.state("a") == "mapped" and blocks["a"].is_intact()
    """
    )


def test_a_tag_that_is_created_during_the_wait_is_not_among_every_tag(run_python):
    run_python(
        HANDED_OVER
        + """
    statuses = []
    pause = lambda: lib.ms_pause(None, c_size_t(0), -1, *no_ranges, None, None, None)
    thread = threading.Thread(target=lambda: statuses.append(pause()), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    new = block_in("new")
    of_new = _C.begin(["new"], [], -1, [])  # this thread owns the tag
    lib.ms_transition_free(begun)
    thread.join(20)
    assert not thread.is_alive() and statuses == [0]
    assert [str(memsaver.state(tag)) for tag in ("a", "b", "new")] == ["paused", "paused", "saving"]
    of_new.run()
    memsaver.resume()
    assert new.is_intact() and blocks["a"].is_intact() and not sim.violations()
    """
    )


@pytest.mark.parametrize("call", ["memsaver.pause('a')", "memsaver.region('a').__enter__()"])
def test_an_interrupt_ends_the_wait_for_a_tag(run_python, call):
    run_python(
        SETUP
        + f"""
    ready, done = threading.Event(), threading.Event()

    def hold():
        begun = _C.begin(["a"], [], -1, [])
        ready.set()
        done.wait(30)
        begun.give_up()

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait(10)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        {call}
    except KeyboardInterrupt:
        interrupted = True
    assert interrupted and _C.region_depth() == 0
    done.set()
    thread.join()
    memsaver.pause("a")
    memsaver.resume("a")
    assert blocks["a"].is_intact()
    """
    )


def test_finalizers_that_resume_do_not_deadlock_two_threads(run_python):
    run_python(
        SETUP
        + """
    gc.set_threshold(3)
    over = time.monotonic() + 1

    class Cycle:
        def __init__(self, tag):
            self.itself, self.tag = self, tag

        def __del__(self):
            try:
                memsaver.resume(self.tag)
            except InvalidStateError:
                pass

    def work(tags):
        while time.monotonic() < over:
            for tag in tags:
                Cycle(tag)
                try:
                    with memsaver.paused(tag):
                        Cycle(tags[0])
                except InvalidStateError:
                    pass

    threads = [threading.Thread(target=work, args=[tags], daemon=True) for tags in ("ab", "ba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    gc.collect()
    memsaver.resume()
    assert all(block.is_intact() for block in blocks.values())
    """
    )


AT_THE_END = {
    "pause": "memsaver.pause('a', wait=False).wait()",
    "resume": "memsaver.resume('b', wait=False).wait()",
    "progress": "memsaver.pause('a', progress=lambda done, total: None)",
    "trim": "memsaver.trim()",
    "trim that is waited for": "memsaver.trim().wait()",
    "timeline": "memsaver.timeline(interval=0.01).start()",
}


@pytest.mark.parametrize(
    "when, cases", [("finalization", list(AT_THE_END)), ("atexit", ["pause", "timeline"])]
)
def test_the_interpreter_exits_with_work_for_another_thread(run_python, when, cases):
    done = run_python(
        SETUP
        + f"""
    import atexit

    calls = [(name, compile(code, name, "exec")) for name, code in {AT_THE_END!r}.items()]
    kept = dict(memsaver=memsaver)

    class AtTheEnd:
        def __del__(self, calls=calls, kept=kept, write=os.write, cases={cases!r}):
            for name, code in calls:
                if name in cases:
                    memsaver.resume("a")
                    memsaver.pause("b")
                    exec(code, kept)
                    write(1, name.encode() + b"; ")

    last = AtTheEnd()
    if {when!r} == "atexit":
        atexit.register(last.__del__)
        AtTheEnd.__del__ = lambda self: None
    else:
        import builtins
        builtins.last = last
        del last
    """
    )
    assert (done.stdout, done.stderr) == ("".join(f"{case}; " for case in cases), "")
