"""Test threads that memsaver starts in a callback, while a finalizer waits for the tag.

The starting thread waits until the new thread runs. If the garbage collector runs the finalizer on
the new thread before that, both wait for ever.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.each_python

CODE = """
    import faulthandler, gc, os, socket, threading
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

    def pausing(tag):
        threading.Thread._set_ident = collect
        {call}()
        threading.Thread._set_ident = begin

    begun = []
    with memsaver.region("t", shareable=True):
        memory = simulator.empty(4)
    with memsaver.region("u", shareable=True):
        tensor = simulator.empty(4)
    memsaver.on_pause(pausing, tag="t")
    memsaver.pause("t")
    assert begun and gc.isenabled()
"""


@pytest.mark.parametrize("call", ["timeline", "send", "connect"])
def test_a_thread_starts_while_a_finalizer_would_wait(run_python, call):
    pytest.importorskip("torch")
    run_python(CODE.replace("{call}", call), with_torch=True)
