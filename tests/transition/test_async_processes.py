"""Tests background transitions in processes that exit, are interrupted, or fork."""

import pytest

pytestmark = pytest.mark.each_python

START = """
    import gc, os, signal, sys, threading, time
    import memsaver
    from simulated_driver import Block, Simulator

    sim = Simulator()
    with memsaver.region("t", backup="host"):
        block = Block(sim, 3 << 20, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test run inherited
"""


def test_exit_waits_for_a_transition(run_python):
    done = run_python(
        START
        + """
    sim.stream_delay(0.3)
    memsaver.on_resume(lambda tag: print("resumed", block.is_intact(), flush=True))
    memsaver.pause("t", wait=False)
    kept = memsaver.resume("t", wait=False)
    print("end", flush=True)
    """
    )
    assert (done.stdout, done.stderr) == ("end\nresumed True\n", "")


def test_exit_with_a_transition_that_fails(run_python):
    done = run_python(
        START
        + """
    sim.stream_delay(0.2)
    sim.fail("cuMemUnmap", 1)
    kept = memsaver.pause("t", wait=False)
    print("end", flush=True)
    """
    )
    assert done.stdout == "end\n"
    assert "MemsaverWarning: the pause of 't' raised an error" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


def test_an_interrupt_leaves_the_transition_running(run_python):
    run_python(
        START
        + """
    nothing = lambda done, total: None
    for call in (
        lambda: memsaver.pause("t", wait=False).wait(),
        lambda: memsaver.pause("t", progress=nothing),
        lambda: memsaver.pause("t", wait=False, progress=nothing).wait(),
    ):
        block.fill(block.seed + 1)
        sim.stream_delay(1)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        try:
            call()
        except KeyboardInterrupt:
            assert time.monotonic() - start < 0.8
        else:
            raise AssertionError("no interrupt")
        assert memsaver.state("t") == "saving"
        sim.stream_delay(0)
        assert memsaver.resume("t").changed == ("t",)
        assert block.is_intact()
    """
    )


def test_a_forked_child_cannot_wait(run_python):
    done = run_python(
        START
        + """
    sim.stream_delay(0.3)
    under_way = memsaver.pause("t", wait=False)
    child = os.fork()
    if child == 0:
        try:
            under_way.wait()
        except memsaver.InvalidStateError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    under_way.wait()
    memsaver.resume("t")
    assert block.is_intact()
    """
    )
    assert done.stderr == ""
