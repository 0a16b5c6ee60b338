"""Tests that callbacks and states stay consistent if signal handlers raise errors during a call."""

from functools import partial

import pytest

pytestmark = [
    pytest.mark.each_python,
    pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning"),
]


@pytest.fixture
def run_python(run_python):
    """Fork the processes, because an interpreter's startup does not affect these tests."""
    return partial(run_python, fresh=False)


INTERRUPTED = """
    import os, signal, threading
    import memsaver
    from simulated_driver import Block, Simulator

    sim = Simulator()
    with memsaver.region("t", backup="host"):
        block = Block(sim, 3 << 20, 1)
    told = []
    memsaver.on_pause(lambda tag: told.append("paused"))
    memsaver.on_resume(lambda tag: told.append("mapped"))

    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test run inherited

    def interrupted(call):
        sim.stream_delay(0.4)
        timer = threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            call("t")
        except KeyboardInterrupt:
            return True
        finally:
            timer.join()
            sim.stream_delay(0)
        return False
"""


@pytest.mark.parametrize("call", ["pause", "resume", "paused"])
def test_the_state_after_an_interrupt_during_the_copies_agrees_with_the_callbacks(run_python, call):
    run_python(
        INTERRUPTED
        + f"""
    def paused(tag):
        with memsaver.paused(tag):
            pass

    if {call!r} == "resume":
        memsaver.pause("t")
    assert interrupted(paused if {call!r} == "paused" else memsaver.{call})
    assert told[-1] == memsaver.state("t"), told
    assert {call!r} != "paused" or told[-1] == "mapped"
    memsaver.resume("t")
    assert block.is_intact() and told[-1] == "mapped"
    """
    )


# Interrupts at every place at which the interpreter checks for signals.

EVERYWHERE = """
    import signal, threading
    import memsaver
    from interrupter import Interrupter
    from memsaver._runtime.native import _C
    from memsaver.integrations.engine import moves
    from memsaver.integrations.engine.ranks import Group
    from simulated_driver import Block, Simulator

    def block_in(tag, seed):
        with memsaver.region(tag, backup="host"):
            return Block(sim, 4796, seed)

    sim = Simulator()
    blocks = {tag: block_in(tag, seed) for seed, tag in enumerate("abc", 1)}
    calls, told = [], dict.fromkeys("abc", "mapped")

    @memsaver.on_pause
    def before(tag):
        calls.append(("pause", tag))
        told[tag] = "paused"

    @memsaver.on_resume
    def after(tag):
        calls.append(("resume", tag))
        told[tag] = "mapped"

    def in_thread(call):
        results = []
        thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
        thread.start()
        thread.join(20)
        assert results, "held by nobody"
        return results[0]

    def settled():
        for thread in threading.enumerate():
            if thread.name.startswith("memsaver-"):
                thread.join()
        return {tag: str(memsaver.state(tag)) for tag in "abc"}

    def start():
        in_thread(memsaver.resume)  # another thread: a turn that was left would be in its way
        if PAUSED:
            memsaver.pause(*PAUSED)
        calls.clear()

    def both():
        with memsaver.paused("a", "b"):
            pass

    block = memsaver.paused("a", "b")

    def again():
        with block:
            pass
"""

TRANSITIONS = {
    "pause": ("", "memsaver.pause('a', 'b')"),
    "resume": ("ab", "memsaver.resume('a', 'b')"),
    "swap": ("c", "memsaver.swap(out=['a', 'b'], into='c')"),
    "paused": ("", "both()"),
    "paused block": ("", "again()"),
    "waiting": ("", "(memsaver.pause('a', 'b', wait=False), memsaver.resume('a', 'b'))"),
    "background": ("", "memsaver.pause('a', 'b', wait=False).wait()"),
    "engine": ("", "moves.pause(Group(None), ['a', 'b'])"),
    "progress": ("ab", "memsaver.resume('a', 'b', progress=lambda done, total: None)"),
}


# Handlers that raise: for Ctrl-C, and for another signal.
SIGNALS = {
    "SIGINT": "Interrupter()",
    "SIGALRM": "Interrupter(signal.SIGALRM, TimeoutError)",
}


def with_signals(cases, *interrupted):
    """Return each case with SIGALRM, and some cases with SIGINT."""
    return [(case, "SIGALRM") for case in cases] + [(case, "SIGINT") for case in interrupted]


@pytest.mark.parametrize("case, number", with_signals(TRANSITIONS, "pause", "waiting"))
def test_transitions_interrupted_everywhere(run_python, case, number):
    paused, call = TRANSITIONS[case]
    done = run_python(
        EVERYWHERE
        + f"""
    PAUSED = {paused!r}
    interrupter = {SIGNALS[number]}
    start()
    for place in interrupter.places(lambda: {call}):
        now = settled()
        assert told == now and now["a"] == now["b"], (place, told, now)
        assert len(set(calls)) == len(calls), (place, calls)
        assert "paused" not in {case!r} or now["a"] == "mapped", place
        in_thread(memsaver.resume)
        assert all(block.is_intact() for block in blocks.values()), place
        start()
    assert place > 150 and sim.violations() == [], place
    """
    )
    assert (done.stdout, done.stderr) == ("", "")


SECTIONS = {
    "region": "region('d')",
    "region of devices": "region('d', device=[0])",
    "disabled": "disabled()",
    "timeline": "timeline(events=16, interval=0.001)",
}


@pytest.mark.parametrize("case, number", with_signals(SECTIONS, "region", "timeline"))
def test_sections_interrupted_everywhere(run_python, case, number):
    # The section is left when the error arrives, whether during entry, inside or during exit.
    run_python(
        EVERYWHERE
        + f"""
    interrupter = {SIGNALS[number]}
    section = memsaver.{SECTIONS[case]}

    def entered():
        with section:
            pass

    for place in interrupter.places(entered):
        assert _C.region_depth() == 0 and "recording" not in repr(section), place
        with memsaver.timeline():  # there is one at a time
            pass
    assert place > 20, place
    """
    )


@pytest.mark.parametrize("number", SIGNALS)
def test_a_gate_interrupted_everywhere(run_python, number):
    run_python(
        f"""
    import signal, threading
    from interrupter import Interrupter
    from memsaver._runtime.latches import Gate

    gate = Gate()
    interrupter = {SIGNALS[number]}

    def pass_it(seconds=5.0):
        with gate.passed(seconds, TimeoutError):
            pass

    for place in interrupter.places(pass_it):
        thread = threading.Thread(target=pass_it)
        thread.start()
        thread.join(3)
        assert not thread.is_alive(), place
    assert place > 25, place
    with gate.passed(1, TimeoutError):
        try:
            pass_it(0.01)
        except TimeoutError:
            pass
        else:
            raise AssertionError("two at a time")
    reentrant = Gate(reentrant=True)
    with reentrant.passed(1, TimeoutError), reentrant.passed(1, TimeoutError):
        pass
    with reentrant.passed(0.01, TimeoutError):
        pass
    """
    )


@pytest.mark.parametrize("number", SIGNALS)
def test_requests_interrupted_everywhere(run_python, number):
    # No request stays counted, and requests do not stay blocked.
    run_python(
        f"""
    import signal
    from interrupter import Interrupter
    from memsaver.integrations.engine.requests import Requests

    requests = Requests()
    interrupter = {SIGNALS[number]}

    def one():
        with requests.one(lambda: None):
            assert not requests.closed

    def none():
        with requests.none(True, lambda: None, lambda: 5.0):
            assert requests.closed

    for call in (one, none):
        for place in interrupter.places(call):
            assert not requests.closed, place
            with requests.none(False, lambda: None, lambda: 0.0):  # refuses where there are some
                pass
        assert place > 20, place
    """
    )


# Other kinds of handlers.

HANDLERS = """
    import os, signal, threading, time
    import memsaver
    from simulated_driver import Block, Simulator

    sim = Simulator()
    with memsaver.region("t", backup="host"):
        block = Block(sim, 4796, 1)
    came = []
"""


@pytest.mark.parametrize("call", ["pause('t')", "region('u').__enter__()"])
def test_another_signals_exception_leaves_interrupts_as_they_were(run_python, call):
    # Ctrl-C works afterwards, regardless of the place at which the other exception was raised.
    run_python(
        HANDLERS
        + f"""
    from interrupter import Interrupter

    class Alarm(BaseException):
        pass

    interrupter = Interrupter(signal.SIGALRM, Alarm)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts = 0
    for place in interrupter.places(lambda: memsaver.{call}):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            interrupts += 1
        assert interrupts == place + 1, place
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, place
        while memsaver._runtime.native._C.region_depth():
            memsaver._runtime.native._C.region_exit()
        memsaver.resume()
    assert place > 25, place
    """
    )
