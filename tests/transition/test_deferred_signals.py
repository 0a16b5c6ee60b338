"""Tests blocks that defer Python's signal handlers and that are nested in every combination and
order."""

from __future__ import annotations

import textwrap

import pytest

pytestmark = pytest.mark.each_python

KINDS = """
    import gc, itertools, os, signal, sys, threading
    from memsaver._runtime.interrupts import interruptible, signals_deferred
    from memsaver._runtime.native import _C

    NUMBERS = [signal.SIGINT, signal.SIGALRM]
    called = []

    class Raised(BaseException):
        pass

    def handler(number, frame):
        called.append(number)

    def other(number, frame):
        called.append(-number)

    def raising(number, frame):
        called.append(number)
        raise Raised(number)

    def set_handlers(handler):
        for number in NUMBERS:
            signal.signal(number, handler)

    def are_set(handler):
        return [signal.getsignal(number) for number in NUMBERS] == [handler] * len(NUMBERS)

    def come(times=1):
        for number in NUMBERS * times:
            signal.raise_signal(number)

    def in_block(block, work):
        with block():
            return work()

    KINDS = {
        "whole": _C.uninterrupted,
        "patient": lambda work: _C.uninterrupted(work, True),
        "between": lambda work: in_block(signals_deferred, work),
        "decorated": lambda work: signals_deferred()(work)(),
        "open": interruptible,
    }

    def defers(kinds):
        '''Whether signals wait in blocks of these kinds, outermost first.'''
        for place, kind in enumerate(kinds):
            if kind in ("between", "decorated"):
                if "open" not in kinds[place:]:
                    return True
            elif kind != "open":
                return True
        return False

    def nested(kinds, work, left=lambda depth: None):
        '''Do the work in such blocks; `left` is called when one was left, with those around.'''
        def at(depth):
            if depth == len(kinds):
                return work()
            KINDS[kinds[depth]](lambda: at(depth + 1))
            left(depth)
        at(0)

    set_handlers(handler)
"""

CASES = {
    "nested blocks": """
    for size in range(5):
        for kinds in itertools.product(KINDS, repeat=size):
            if size == 4 and "open" not in kinds:
                continue
            waits = [defers(kinds[:depth]) for depth in range(size + 1)]

            def work():
                come(3)
                assert sorted(called) == sorted(NUMBERS * (0 if waits[size] else 3)), kinds

            def left(depth):
                assert set(called) == (set() if all(waits[depth:]) else set(NUMBERS)), kinds

            called.clear()
            nested(kinds, work, left)
            # A signal that waited is handled once, however often it came.
            assert sorted(called) == sorted(NUMBERS * (1 if waits[size] else 3)), kinds
            assert are_set(handler), kinds
    """,
    "handlers that raise": """
    set_handlers(raising)
    for size in range(1, 4):
        for kinds in itertools.product(KINDS, repeat=size):
            called.clear()
            try:
                nested(kinds, come)
            except Raised as error:
                # The first exception counts. If the second handler waits longer, what it raises
                # comes in the first exception's place, as in any `finally`.
                several = "open" in kinds
                chain = [error, error.__context__] if several else [error]
                assert Raised(called[0]).args in [one.args for one in chain if one], kinds
            else:
                raise AssertionError(kinds)
            assert are_set(raising), kinds
            called.clear()
            try:
                signal.raise_signal(signal.SIGALRM)
            except Raised:
                pass
            assert called == [signal.SIGALRM], kinds
    """,
    "an error of the work": """
    set_handlers(raising)
    for kind, deferred in KINDS.items():
        def work():
            if kind != "open":  # in which handlers raise at once
                come()
            raise ValueError("of the work")

        try:
            deferred(work)
        except Raised as error:
            assert isinstance(error.__context__, ValueError), kind
        except ValueError:
            assert kind == "open"
        assert are_set(raising), kind
    """,
    "open work": """
    # Signals that came before are handled on its way in, and an exception keeps it from beginning.
    def work():
        assert sorted(called) == NUMBERS
        return "done"

    with signals_deferred(), signals_deferred():
        come()
        assert not called
        assert interruptible(work) == "done"
        come()
        assert len(called) == 2
    assert len(called) == 4
    set_handlers(raising)
    called.clear()
    try:
        with signals_deferred():
            come()
            try:
                interruptible(lambda: called.append("work"))
            except Raised:
                assert len(called) == 1  # one exception at a time
                come()
                assert len(called) == 1
                raise KeyError
            raise AssertionError
    except Raised as error:
        assert isinstance(error.__context__, KeyError)
    assert "work" not in called and are_set(raising)
    # While a handler runs in open work, others wait.
    seen = []

    def slow(number, frame):
        seen.append(("begin", number))
        if len(seen) == 1:
            come()
        seen.append(("end", number))

    set_handlers(slow)
    with signals_deferred():
        interruptible(lambda: signal.raise_signal(signal.SIGALRM))
        assert [what for what, _ in seen] == ["begin", "end"] * 3
        assert [number for _, number in seen[2:]] == [2, 2, 14, 14]
    """,
    "handlers that are set": """
    for kind in ("whole", "patient", "between"):
        def work():
            come()
            set_handlers(other)
        set_handlers(handler)
        called.clear()
        KINDS[kind](work)
        assert are_set(other) and sorted(called) == [-14, -2], kind
    # In open work: a block inside defers the new ones, too.
    def work():
        set_handlers(other)
        called.clear()
        for kind in ("whole", "patient", "between"):
            KINDS[kind](lambda: (come(2), called.append("last")))
            assert called == ["last", -2, -14], (kind, called)
            assert are_set(other)
            called.clear()
        set_handlers(before)
        come()
        assert called == [2, 14], called
        called.clear()

    set_handlers(handler)
    with signals_deferred():
        before = signal.getsignal(signal.SIGINT)
        interruptible(work)
        come()
        assert called == []
    assert called == [2, 14] and are_set(handler)
    # One that was read in a block, and is set again after it.
    signal.signal(signal.SIGINT, before)
    called.clear()
    come()
    assert called == [2, 14]
    with signals_deferred():
        come()
        assert called == [2, 14]
    assert called == [2, 14] * 2
    """,
    "ends in another order": """
    for first, second, third in itertools.permutations(range(3)):
        blocks = [signals_deferred() for _ in range(3)]
        called.clear()
        for block in blocks:
            block.__enter__()
        for place in (first, second):
            blocks[place].__exit__(None, None, None)
            come()
            assert not called
        blocks[third].__exit__(None, None, None)
        assert called == [2, 14] and are_set(handler)
        blocks[third].__exit__(None, None, None)  # twice is allowed
    """,
    "left half-way": """
    block = signals_deferred()
    block.__enter__()
    come()
    assert called == []
    del block
    gc.collect()
    for _ in range(100):  # soon
        pass
    assert sorted(called) == [2, 14] and are_set(handler)
    # One that another thread lets go of, which can set no handlers.
    blocks = [signals_deferred()]
    blocks[0].__enter__()
    thread = threading.Thread(target=blocks.clear)
    thread.start()
    thread.join()
    called.clear()
    come()
    assert called == [2, 14]
    with signals_deferred():
        come()
        assert called == [2, 14]
    assert called == [2, 14] * 2 and are_set(handler)
    """,
    "another thread": """
    def work():
        for kinds in itertools.product(KINDS, repeat=2):
            nested(kinds, lambda: come)
        done.append(are_set(expected))

    expected, done = handler, []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]
    def in_main():
        global expected
        expected = signal.getsignal(signal.SIGINT)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        come()
        assert called == []
    for kind in ("whole", "patient", "between"):
        called.clear()
        KINDS[kind](in_main)
        assert called == [2, 14] and done.pop() and are_set(handler)
    """,
    "a forked child": """
    def fork():
        child = os.fork()
        if child == 0:
            good = not called and are_set(handler)
            come()
            os._exit(7 if good and called == [2, 14] else 1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    def by_thread():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    for forked in (fork, by_thread):
        for text in ("whole", "between whole", "between open patient"):
            kinds = text.split()
            statuses = []
            called.clear()
            nested(kinds, lambda: (come(), forked()))
            assert statuses == [7] and called == [2, 14] and are_set(handler), kinds
    # A child that leaves the block itself.
    called.clear()
    with signals_deferred():
        come()
        child = os.fork()
    come()
    if child == 0:
        os._exit(7 if called == [2, 14] and are_set(handler) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert called == [2, 14] * 2
    """,
}


def test_signals_are_handled_as_the_rules_state(run_python):
    cases = {name: textwrap.dedent(code) for name, code in CASES.items()}
    run_python(
        KINDS
        + f"""
    for name, code in {cases!r}.items():
        print(name, flush=True)  # the last one is that of a failure
        called.clear()
        set_handlers(handler)
        exec(code, globals())
    """
    )
