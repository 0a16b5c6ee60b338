"""Ctrl-C in the middle of a transition: what callbacks were told is what is."""

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")


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
        sim.stream_delay(0.2)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
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


def test_an_interrupted_pause_matches_what_callbacks_were_told(run_python):
    run_python(
        INTERRUPTED
        + """
    assert interrupted(memsaver.pause)
    assert told[-1] == memsaver.state("t"), told
    memsaver.resume("t")
    assert block.is_intact() and told[-1] == "mapped"
    """
    )


def test_an_interrupted_resume_matches_what_callbacks_were_told(run_python):
    run_python(
        INTERRUPTED
        + """
    memsaver.pause("t")
    assert interrupted(memsaver.resume)
    assert told[-1] == memsaver.state("t"), told
    memsaver.resume("t")
    assert block.is_intact() and told[-1] == "mapped"
    """
    )


def test_an_interrupted_paused_resumes(run_python):
    run_python(
        INTERRUPTED
        + """
    def paused(tag):
        with memsaver.paused(tag):
            pass

    assert interrupted(paused)
    assert memsaver.state("t") == "mapped", told
    assert told[-1] == "mapped" and block.is_intact()
    """
    )
