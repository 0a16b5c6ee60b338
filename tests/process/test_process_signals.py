"""Tests signals that a process receives during a transition.

Each case runs in a separate process, whose exit status and output are checked.
"""

import signal

import pytest
from test_process import code

pytestmark = pytest.mark.long

STORM = """
import signal, threading, time

signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test run inherited

def block_in(name, kind, seed):
    with memsaver.region(name, backup=kind):
        return Block(sim, (3 << 20) + 700, seed)

def interrupted(call, seconds):
    '''Send SIGINT after some seconds; return whether it interrupted the call or the next lines.'''
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        call()
        while timer.is_alive():
            time.sleep(0.001)
        time.sleep(0.001)
    except KeyboardInterrupt:
        return True
    finally:
        timer.join()
    return False
"""


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_an_interrupt_during_a_pause_comes_after_it(run_python, tmp_path, kind):
    done = run_python(
        code(
            STORM
            + f"""
block = block_in("t", {kind!r}, 1)
sim.stream_delay(0.6)
start = time.monotonic()
assert interrupted(lambda: memsaver.pause("t"), 0.2)
assert time.monotonic() - start > 0.5 and memsaver.state("t") == "paused"
assert not sim.accessible(block.address)
assert interrupted(lambda: memsaver.resume("t"), 0.2)
sim.stream_delay(0)
assert memsaver.state("t") == "mapped" and block.is_intact()
block.fill(2)
sim.stream_delay(0.6)
sim.fail("cuMemUnmap", 1)
assert interrupted(lambda: memsaver.pause("t"), 0.2)  # a failure and an interrupt
assert memsaver.state("t") == "mapped" and block.is_intact()
assert sim.violations() == []
os.kill(os.getpid(), signal.SIGINT)
time.sleep(1)
"""
        ),
        status=None,
        MEMSAVER_DISK_DIR=tmp_path,
    )
    assert done.returncode == -signal.SIGINT and done.stdout == ""
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_signals_do_not_break_interrupted_system_calls(run_python, tmp_path):
    run_python(
        code(
            """
            import signal

            came = []
            signal.signal(signal.SIGALRM, lambda number, frame: came.append(memsaver.state("t")))
            signal.siginterrupt(signal.SIGALRM, True)
            with memsaver.region("t", backup="disk"):
                block = Block(sim, 18 << 20, 1)
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
            for seed in range(10):
                block.fill(seed)
                with memsaver.paused("t", backup=["disk", "host", "pageable"][seed % 3]):
                    pass
                assert block.is_intact()
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert len(came) > 20
            assert sim.violations() == []
            """
        ),
        MEMSAVER_DISK_DIR=tmp_path,
    )


def test_a_signal_handler_can_pause_and_resume(run_python):
    run_python(
        code(
            """
            import signal

            block = use("t")
            depth = []
            def handler(number, frame):
                if len(depth) < 3:
                    depth.append(1)
                    with memsaver.paused("t"):
                        pass
            signal.signal(signal.SIGUSR1, handler)
            memsaver.on_pause(lambda tag: signal.raise_signal(signal.SIGUSR1))
            memsaver.on_resume(lambda tag: signal.raise_signal(signal.SIGUSR1))
            for _ in range(3):
                with memsaver.paused("t"):
                    pass
            assert memsaver.state("t") == "mapped" and block.is_intact() and len(depth) == 3
            """
        )
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGQUIT], ids=str)
def test_killed_in_the_middle_of_a_pause(run_python, tmp_path, number):
    done = run_python(
        code(
            f"""
            import resource, threading, time
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            with memsaver.region("t", backup="disk"):
                block = Block(sim, 18 << 20, 1)
            with memsaver.paused("t"):
                pass
            block.fill(2)
            sim.stream_delay(0.3)
            threading.Timer(0.1, os.kill, (os.getpid(), {int(number)})).start()
            print("now", flush=True)
            memsaver.pause("t")
            time.sleep(5)
            """
        ),
        status=-number,
        MEMSAVER_DISK_DIR=tmp_path,
    )
    assert (done.stdout, done.stderr) == ("now\n", "")
    assert list(tmp_path.iterdir()) == [], "nothing is left on disk"


def test_a_signal_handler_may_exit_the_process(run_python):
    done = run_python(
        code(
            """
            import signal, threading

            block = use("t")
            block.fill(2)
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
            memsaver.on_resume(lambda tag: print("resumed", block.is_intact(), flush=True))
            sim.stream_delay(1)
            kill = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
            memsaver.on_pause(lambda tag: kill.start())  # when the pause has begun
            with memsaver.paused("t"):
                print("not reached")
            """
        ),
        status=5,
    )
    assert (done.stdout, done.stderr) == ("resumed True\n", "")
