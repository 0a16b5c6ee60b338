"""Tests events in the life of a process: exec, exit, and the start and end of threads.

Each case runs in a separate process, whose exit status and output are checked.
"""

import signal

import pytest
from test_process import code

pytestmark = pytest.mark.long


# --- another program ------------------------------------------------------------------------------

INHERITED = """
from descriptors import open_descriptors

def inherited():
    return [
        where
        for number, where in open_descriptors().items()
        if number > 2 and ("memfd" in where or "(deleted)" in where or "nvidia" in where)
    ]
"""


@pytest.mark.parametrize("how", ["exec", "subprocess", "posix_spawn"])
def test_another_program_inherits_nothing(run_python, tmp_path, how):
    # The new program inherits nothing from the first, and memsaver works in it as in any program.
    program = tmp_path / "program.py"
    program.write_text(
        "import os\n" + INHERITED + "assert inherited() == []\n" + code("use()\nprint('program')\n")
    )
    start = {
        "exec": f"os.execv(sys.executable, [sys.executable, {str(program)!r}])",
        "subprocess": "import subprocess; subprocess.run("
        f"[sys.executable, {str(program)!r}], check=True, close_fds=False)",
        "posix_spawn": "pid = os.posix_spawn(sys.executable, "
        f"[sys.executable, {str(program)!r}], os.environ)\n"
        "assert os.waitpid(pid, 0)[1] == 0",
    }[how]
    done = run_python(
        code(
            INHERITED
            + f"""
blocks = [use("mapped")]
for kind in ("host", "pageable", "disk"):
    with memsaver.region(kind, backup=kind):
        blocks.append(Block(sim, 3 << 20, len(blocks)))
    memsaver.pause(kind)
assert len(inherited()) >= 2, "the device and the backup's file, of this process only"
under_way = memsaver.resume("host", wait=False)
{start}
under_way.wait()
memsaver.resume()
assert all(block.is_intact() for block in blocks[1:]) and sim.violations() == []
"""
        ),
        MEMSAVER_DISK_DIR=tmp_path,
    )
    assert (done.stdout, done.stderr) == ("program\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


# --- exit -----------------------------------------------------------------------------------------

STATES = """
def block_in(name, kind, seed):
    with memsaver.region(name, backup=kind):
        return Block(sim, 3 << 20, seed)

blocks = {}
for kind in ("none", "host", "pageable", "disk"):
    for state in ("mapped", "paused", "resumed"):
        blocks[kind, state] = block_in(f"{kind} {state}", kind, len(blocks))
memsaver.pause(*(f"{kind} {state}" for kind, state in blocks if state != "mapped"))
memsaver.resume(*(f"{kind} {state}" for kind, state in blocks if state == "resumed"))
print("done", flush=True)
"""


NO_CORE = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
OPEN = """
opened = memsaver.region("open")
opened.__enter__()
inside = simulator.buffer(4096)
"""


@pytest.mark.parametrize(
    ("end", "status", "says"),
    [
        ("", 0, ""),
        ("import threading; threading.Thread(target=sys.exit).start()", 0, ""),
        ("sim.deinitialize(True)", 0, ""),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(lambda: (memsaver.resume(), blocks.clear()))", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("os._exit(3)", 3, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("os.abort()", -signal.SIGABRT, ""),
        ("sim.stream_delay(0.2); kept = memsaver.resume('host paused', wait=False)", 0, ""),
        ("sim.stream_delay(0.2); kept = memsaver.resume(wait=False); os._exit(4)", 4, ""),
        (
            "sim.stream_delay(0.2); kept = memsaver.swap(out='host mapped', into='host paused', "
            "wait=False); sys.exit(6)",
            6,
            "",
        ),
        ("sys.modules.clear()", 0, ""),
        ("memsaver.paused('host mapped').__enter__()", 0, ""),
        ("kept = memsaver.paused('host mapped'); kept.__enter__(); kept.own = kept", 0, ""),
        ("sim.hold_streams(True); memsaver.pause('host mapped', wait=False); os._exit(2)", 2, ""),
    ],
)
def test_exit_with_every_backup_in_every_state(run_python, tmp_path, end, status, says):
    done = run_python(
        code(NO_CORE + STATES + OPEN + end),
        status=status,
        MEMSAVER_DISK_DIR=tmp_path,
    )
    assert done.stdout == "done\n"
    assert says in done.stderr if says else done.stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_the_order_in_which_the_interpreter_ends(run_python, tmp_path):
    # Finalizers of every kind run before and after memsaver's modules are cleared, with memory in
    # every state and threads that pause; the library's last calls still find all they need.
    done = run_python(
        code(
            STATES
            + """
import atexit, builtins, threading, time, weakref

class Last:
    '''Lives in a module that goes late; its memory and its calls outlive memsaver's modules.'''
    def __init__(self, block):
        self.block = block
    def __del__(self, stats=memsaver.stats, state=memsaver.state, free=_C.free, trim=_C.trim):
        trim()
        self.block = None

builtins.kept_last = Last(blocks.pop(("host", "mapped")))
sys.kept_last = Last(blocks.pop(("host", "paused")))
os.kept_last = Last(blocks.pop(("disk", "paused")))
cycle = Last(blocks.pop(("pageable", "resumed")))
cycle.itself = cycle
weakref.finalize(cycle, memsaver.resume, "pageable paused")
atexit.register(lambda: memsaver.pause("pageable mapped"))
atexit.register(lambda: print("atexit", memsaver.state("none mapped"), flush=True))
memsaver.on_pause(lambda tag: None)

def again_and_again():
    while True:
        memsaver.pause("none resumed")
        memsaver.resume("none resumed")

threading.Thread(target=again_and_again, daemon=True).start()
held = threading.local()
held.region = memsaver.region("open")
held.region.__enter__()
time.sleep(0.05)
"""
        ),
        MEMSAVER_DISK_DIR=tmp_path,
    )
    assert (done.stdout, done.stderr) == ("done\natexit mapped\n", "")


@pytest.mark.parametrize(
    "call",
    ["memsaver.resume", "memsaver.pause", "lambda tag: memsaver.pause(tag, wait=False)"],
    ids=["resume", "pause", "pause without waiting"],
)
def test_a_finalizer_that_needs_the_tag_of_a_stopped_thread_fails(run_python, call):
    # At exit, Python stops a daemon thread in its callback, so that the tag stays reserved.
    done = run_python(
        f"""
        import builtins, os, threading, time
        import memsaver

        with memsaver.region("t", backup="host"):
            pass
        entered = threading.Event()

        class Last:
            def __del__(self, call={call}, write=os.write, errors=memsaver.InvalidStateError):
                try:
                    call("t")
                except errors as error:
                    write(1, f"{{error.tag}}: {{error}}".encode())

        builtins.kept_last = Last()

        @memsaver.on_pause
        def wait(tag):
            entered.set()
            time.sleep(0.3)

        threading.Thread(target=memsaver.pause, args=("t",), daemon=True).start()
        entered.wait()
        """,
        timeout=30,
    )
    assert done.stdout.startswith("t: the wait for 't' was ended") and "exiting" in done.stdout


# --- threads and the interpreter's lock -----------------------------------------------------------


def test_a_transition_that_nobody_ran_waits_without_the_lock_of_the_interpreter(run_python):
    # Cancelling waits for the device, which another thread releases; that thread needs the
    # interpreter's lock.
    run_python(
        code(
            """
            import threading
            from tasks import Task

            with memsaver.region("t", backup="host"):
                block, other = Block(sim, 64 << 20, 1), Block(sim, 3 << 20, 2)
            begun = [_C.begin(["t"], [], -1, [])]
            block.buffer.array = None  # freed when the tag is let go, after the device's work
            with sim.stream() as stream:
                sim.hold_streams(True)
                sim.memset(other.address, 7, 100, stream)
                giving_up = Task(begun.clear)
                threading.Event().wait(0.2)
                sim.hold_streams(False)
                giving_up.result()
            assert memsaver.state("t") == "mapped" and sim.violations() == []
            assert memsaver.stats()["t"][0].allocations == 1
            with memsaver.paused("t"):
                pass
            assert other.bytes()[:101] == b"\\7" * 100 + other.expected()[100:101]
            """
        ),
        timeout=30,
    )


def test_a_child_forked_while_a_thread_starts_collects_garbage(run_python):
    # The starting thread disables the collector, and does not exist in the child.
    run_python(
        """
        import gc, os
        from memsaver._runtime.native import _C

        _C.pause_collection()
        child = os.fork()
        if child == 0:
            was = gc.isenabled()
            _C.resume_collection()
            _C.pause_collection()
            _C.resume_collection()
            os._exit(0 if was and gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert not gc.isenabled()
        _C.resume_collection()
        assert gc.isenabled()
        """
    )


def test_simulated_memory_outlives_exit_handlers(run_python):
    done = run_python(
        """
        import atexit
        from memsaver import simulator
        import memsaver

        blocks = []
        atexit.register(lambda: print(blocks[0].array[:4]))  # runs after later handlers
        with memsaver.region("w", backup="host"):
            blocks.append(simulator.buffer(1 << 20))
        blocks[0].array[:4] = b"kept"
        """
    )
    assert done.stdout == "b'kept'\n"
