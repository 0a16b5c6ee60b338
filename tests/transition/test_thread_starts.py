"""Tests threads that memsaver starts in a callback while a finalizer waits for the tag.

The starting thread waits until the new thread runs. If the garbage collector ran the finalizer on
the new thread before that, both threads would wait forever.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.each_python

CODE = """
    import contextlib, faulthandler, gc, os, socket, threading, time
    from multiprocessing.reduction import ForkingPickler
    import memsaver
    from memsaver import simulator
    from memsaver._memory.sharing.peers import Peer

    faulthandler.dump_traceback_later(40, exit=True)
    gc.set_threshold(100_000)

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            memsaver.resume("t")

    begin = threading.Thread._set_ident  # called before the starting thread continues

    def collect(thread):
        if gc.isenabled():
            Cycle()
            gc.collect()
        begun.append(thread.name)
        begin(thread)

    def timeline():
        with memsaver.timeline(interval=0.01):
            pass

    def send():
        ForkingPickler.dumps(tensor)

    def connect():
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("\\0memsaver-test" + str(os.getpid()))
        listener.listen()
        Peer(listener.getsockname()[1:].decode(), "t").close()

    def resolve():
        from memsaver.integrations.engine.http.sockets import _addresses

        _addresses("localhost", 1, time.monotonic() + 10)

    def aside():
        from memsaver.integrations.rollout.weights.sender import Aside

        assert Aside(lambda: None).wait(10)

    def low_water():
        from memsaver.integrations.rollout.low_water import LowWater

        class Water(LowWater):
            def look(self):
                if threading.current_thread() is not threading.main_thread():
                    memsaver.resume("t")  # as in a finalizer, after the start
                super().look()

        with Water(0):
            time.sleep(0.05)

    def loop():
        from memsaver.integrations.engine.loops import LoopThread

        LoopThread().close()

    def parent():
        from memsaver.integrations.engine.processes import Parent

        made = Parent()
        made.run(lambda: None)
        made.end()

    def start():
        from memsaver.integrations.engine.starting import started

        started(lambda: None, threading.get_native_id(), time.monotonic() + 10, "a fake")

    def nccl():
        from memsaver.integrations.engine.nccl import Call

        Call("ncclCommSuspend", lambda: 0).wait(10)

    def blocking():
        import asyncio
        from memsaver.integrations.engine.blocking import run

        async def notebook():
            assert run(answer) == "text"

        async def answer():
            return "text"

        asyncio.run(notebook())

    def served():
        from memsaver.integrations.engine.errors import EngineError
        from memsaver.integrations.engine.interface import Request
        from memsaver.integrations.vllm.served import ServedEngine

        engine = ServedEngine("http://127.0.0.1:1")
        with contextlib.suppress(EngineError):
            engine.samples([Request([1], {"seed": 1})], 10)

    def pausing(tag):
        threading.Thread._set_ident = collect
        call()
        threading.Thread._set_ident = begin

    begun = []
    with memsaver.region("t", shareable=True):
        memory = simulator.empty(4)
    with memsaver.region("u", shareable=True):
        tensor = simulator.empty(4)
    memsaver.on_pause(pausing, tag="t")
    for call in CALLS:
        print(call.__name__, flush=True)  # the last one is that of a failure
        begun.clear()
        if call is parent:  # the main thread starts an engine's processes itself
            thread = threading.Thread(target=memsaver.pause, args=("t",), daemon=True)
            thread.start()
            thread.join()
        else:
            memsaver.pause("t")
        assert begun and gc.isenabled()
        memsaver.resume("t")
"""


INTEGRATIONS = [
    "resolve",
    "aside",
    "low_water",
    "loop",
    "parent",
    "start",
    "nccl",
    "blocking",
    "served",
]


@pytest.mark.parametrize("calls", [["timeline", "send", "connect"], INTEGRATIONS], ids=" ".join)
def test_no_finalizer_runs_before_a_new_thread_has_started(run_python, calls):
    pytest.importorskip("torch")
    run_python(CODE.replace("CALLS", f"[{', '.join(calls)}]"), with_torch=True)
