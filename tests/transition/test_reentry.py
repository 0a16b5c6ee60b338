"""Tests nested calls on the same thread, such as calls by finalizers and signal handlers."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.each_python

# If a call hangs, the process prints its stacks and exits with 1, long before the test's timeout.
TOOLS = """
    import faulthandler, itertools, sys, threading, types
    import memsaver
    from memsaver._runtime import latches

    faulthandler.dump_traceback_later(40, exit=True)

    def reentered_everywhere(call, reset=lambda: None, again=None):
        '''Make the call as often as it has lines: each time, one line calls `again` first.'''
        again = again or call
        for place in itertools.count(1):
            reset()
            seen = 0

            def on_line(frame, event, argument):
                nonlocal seen
                if event == "line":
                    seen += 1
                    if seen == place:
                        again()
                return on_line

            def on_call(frame, event, argument):
                file = frame.f_code.co_filename
                return on_line if any(name in file for name in FILES) else None

            sys.settrace(on_call)
            try:
                call()
            finally:
                sys.settrace(None)
            if seen < place:
                return place - 1
"""

CASES = {
    "pickling": (
        ["memsaver/_memory/pickling.py"],
        """
    import copyreg, io, torch
    from multiprocessing.reduction import ForkingPickler
    from memsaver._memory import pickling

    def reset():
        pickling._registered = False

    assert reentered_everywhere(lambda: pickling.register(torch), reset) > 5
    for kind in (torch.Tensor, torch.nn.Parameter):
        for ways in (copyreg.dispatch_table, ForkingPickler(io.BytesIO()).dispatch_table):
            assert type(ways[kind]).__module__ == pickling.__name__
            assert type(ways[kind]._otherwise).__module__ != pickling.__name__, "asked twice"
    """,
    ),
    "torch pools": (
        ["memsaver/_memory/torch_mode.py", "memsaver/_memory/pickling.py"],
        """
    import torch
    from memsaver._memory import torch_mode

    torch_mode._C = types.SimpleNamespace(driver_info=lambda: (0, "libcuda.so", False))
    torch.cuda.is_available = lambda: True
    torch.cuda.Stream = lambda device: object()
    torch.cuda.memory.CUDAPluggableAllocator = lambda *names: object()
    found, streams = set(), set()

    def reset():
        torch_mode._pools.clear()
        found.clear()

    def find():
        found.add(torch_mode.torch_pools())
        assert len(found) == 1

    assert reentered_everywhere(find, reset) > 5
    (pools,) = found
    pools.new_pool = lambda device: types.SimpleNamespace(
        id=(0, next(ids)), use_count=lambda: 0
    )
    pools.close_pool = lambda device, pool: None
    ids = itertools.count()

    def stream():
        streams.add(pools.capture_stream(0))
        assert len(streams) == 1

    def no_stream():
        torch_mode._capture_streams.clear()
        streams.clear()

    assert reentered_everywhere(stream, no_stream) == 3

    def capture():
        with pools.capture_pool(0, "t", (7, 7)) as pool:
            assert pool[0] == 0

    assert reentered_everywhere(capture) > 5
    """,
    ),
    "connections of ranks": (
        ["memsaver/distributed/", "memsaver/_runtime/latches.py"],
        """
    import gc
    import torch.distributed as dist
    from memsaver.distributed.channel import Channel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    names, refused = itertools.count(), []

    def exchange():
        channel = Channel(lane=str(next(names)))
        channel.connect(30, "a test")
        assert channel.all_gather(b"x", 30, "a test") == [b"x"]
        channel.close()

    def one_exchange():
        channel.append(Channel(lane=str(next(names))))
        assert channel[-1].all_gather(b"x", 30, "a test") == [b"x"]

    def same_exchange():
        if channel:
            try:
                assert channel[-1].all_gather(b"x", 30, "a test") == [b"x"]
            except memsaver.InvalidStateError as error:
                refused.append(str(error))

    def closed():
        if channel:
            channel[-1].close()

    def exchange_that_is_closed():
        try:
            one_exchange()
        except memsaver.MemsaverError as error:
            refused.append(str(error))
        closed()
        assert not channel[-1]._link.gloo and channel[-1]._link.store is None

    channel = []
    assert reentered_everywhere(exchange) > 50
    assert reentered_everywhere(one_exchange, channel.clear, same_exchange) > 50
    assert any("is creating the connections" in text for text in refused), refused
    refused.clear()
    assert reentered_everywhere(exchange_that_is_closed, channel.clear, closed) > 50
    assert any("closed" in text for text in refused), refused
    """,
    ),
    "a gate": (
        ["memsaver/_runtime/latches.py"],
        """
    gate, reentrant = latches.Gate(), latches.Gate(reentrant=True)
    inside, refused = [], []

    def pass_it():
        try:
            with gate.passed(1000, TimeoutError):
                assert not inside
                inside.append(True)
                inside.pop()
        except TimeoutError:
            refused.append(True)

    assert reentered_everywhere(pass_it) > 20
    assert refused
    refused.clear()
    pass_it()
    assert not refused

    def pass_reentrant():
        with reentrant.passed(1000, TimeoutError):
            pass

    assert reentered_everywhere(pass_reentrant) > 20 and not reentrant._inside

    # The finalizer may wait for a tag whose owner tries to enter the gate.
    def try_elsewhere():
        def try_it(gate):
            try:
                with gate.passed(0, TimeoutError):
                    passed.append(gate)
            except TimeoutError:
                pass

        threads = [threading.Thread(target=try_it, args=[each]) for each in (gate, reentrant)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    passed = []
    for call in (pass_it, pass_reentrant):
        reentered_everywhere(call, again=try_elsewhere)
    assert {gate, reentrant} == set(passed) and not gate._inside and not reentrant._inside

    # A finalizer stays alone in the gate after a block in its own block.
    def pass_nested():
        with reentrant.passed(1000, TimeoutError):
            pass_reentrant()
            try_elsewhere()

    passed.clear()
    reentered_everywhere(pass_reentrant, again=pass_nested)
    assert reentrant not in passed, "two threads were in a gate"
    assert not reentrant._inside
    """,
    ),
    "a sender of weights": (
        ["rollout/weights/sender.py"],
        """
    from memsaver.integrations.rollout.weights import sender as module

    ended = []

    def create_group(*_):
        return types.SimpleNamespace(shutdown=lambda: ended.append(True))

    module.create_group = create_group

    def reset():
        global sender
        sender = module.Sender("name", "nccl", 2, 30)
        ended.clear()

    def use():
        sender.connect()
        sender.close()
        assert ended == [True]

    assert reentered_everywhere(use, reset, lambda: sender.close()) > 5
    """,
    ),
    "an engine's loop": (
        ["sglang/engines.py"],
        """
    import asyncio
    from memsaver.integrations.sglang.engines import LocalEngine

    loop = asyncio.new_event_loop()

    async def answer():
        if nested:
            nested.pop()()
        return "text"

    sglang = types.SimpleNamespace(
        loop=loop,
        tokenizer_manager=types.SimpleNamespace(),
        generate=lambda: loop.run_until_complete(answer()),
    )
    engine, nested = LocalEngine(sglang), []

    def generate():
        try:
            assert engine.generate() == "text"
        except memsaver.InvalidStateError:
            refused.append(True)

    refused = []
    reentered_everywhere(generate)
    assert not refused
    nested.append(generate)  # while the loop runs
    generate()
    assert refused == [True]
    """,
    ),
    "a vLLM engine": (
        ["vllm/engines.py", "vllm/local.py", "engine/locks.py"],
        """
    from memsaver.integrations.vllm.engines import LocalEngine

    llm = types.SimpleNamespace(
        llm_engine=types.SimpleNamespace(engine_core=types.SimpleNamespace(engine_core=None)),
        generate=lambda: "text",
        sleep=lambda **_: made.append("sleep"),
    )
    engine, made, refused = LocalEngine(llm), [], []

    def generate():
        try:
            assert engine.generate() == "text"
            made.append("generate")
        except memsaver.InvalidStateError as error:
            refused.append(str(error))

    def sleep():
        engine.call("sleep", {}, 30)

    for call in (generate, sleep):
        assert reentered_everywhere(call, again=generate) > 3
    assert {"generate", "sleep"} == set(made) and "another call" in refused[0]
    refused.clear()
    generate()
    assert not refused
    """,
    ),
    "the drop-in's first call": (
        ["torch_memory_saver/entrypoint.py", "torch_memory_saver/backups.py"],
        """
    from repository import ROOT

    sys.path.insert(0, str(ROOT / "integrations" / "torch_memory_saver"))
    from torch_memory_saver import entrypoint

    found = set()

    def reset():
        entrypoint._shared.clear()
        found.clear()

    def find():
        found.add(entrypoint._process("torch"))
        assert len(found) == 1

    assert reentered_everywhere(find, reset) > 5
    """,
    ),
    "first calls of the plugin": (
        ["sglang/plugin.py"],
        """
    from memsaver.integrations.sglang import plugin

    firsts = []

    def reset():
        plugin._done.clear()
        firsts.clear()

    def look():
        firsts.append(plugin._first("it"))
        assert firsts.count(True) <= 1

    assert reentered_everywhere(look, reset) == 2
    assert sorted(firsts) == [True]
    """,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_calls_can_be_made_again_at_each_of_their_lines(run_python, case):
    files, code = CASES[case]
    if "torch" in code:
        pytest.importorskip("torch")
    run_python(f"    FILES = {files!r}" + TOOLS + code, with_torch="torch" in code)


def test_no_collection_or_handler_runs_while_a_mutex_is_locked(run_python):
    code = """
    import gc, signal, threading
    from memsaver._runtime.latches import Mutex

    class Cycle:
        def __init__(self):
            self.itself = self

        def __del__(self):
            came.append("finalizer")

    def enter():
        with mutex.locked():
            came.append("thread")

    came, mutex = [], Mutex()
    signal.signal(signal.SIGUSR1, lambda *_: came.append("handler"))
    gc.set_threshold(5)
    other = threading.Thread(target=enter)
    with mutex.locked():
        Cycle()
        with mutex.locked():
            kept = [[] for _ in range(1000)]
        signal.raise_signal(signal.SIGUSR1)
        other.start()
        other.join(0.1)
        assert came == []
    kept += [[] for _ in range(1000)]
    other.join(10)
    assert sorted(came) == ["finalizer", "handler", "thread"]
    """
    run_python(code)
