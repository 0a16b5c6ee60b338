"""Tests requests to a sleeping `LLM`, whose calls block, with the fake vLLM."""

import pytest

PROCESSES = [
    {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
]
START = """
import os, threading, time
from memsaver.errors import *
from memsaver.integrations.engine.errors import EngineAsleepError
def refusal(call):
    return refused(EngineAsleepError, call)
llm = LLM(enable_sleep_mode=True, distributed_executor_backend=os.environ.get("BACKEND"))
before = llm.generate(PROMPTS)
"""


@pytest.fixture(params=PROCESSES, ids=["in process", "engine core"])
def blocking(run_vllm, request):
    def run(body, when="refuse", wait=20, after=0, **env):
        run_vllm(
            START + body,
            timeout=120,
            MEMSAVER_VLLM_ASLEEP=when,
            MEMSAVER_VLLM_ASLEEP_WAIT=wait,
            MEMSAVER_VLLM_SLEEP_AFTER=after,
            **request.param,
            **env,
        )

    return run


@pytest.mark.each_python
def test_requests_are_refused_while_memory_is_released(blocking):
    blocking(
        """
for level in (1, 2):
    llm.sleep(level=level)
    error = refusal(lambda: llm.generate(PROMPTS))
    assert error.tags == ("kv_cache", "weights") and error.status_code == 503
    assert not llm.llm_engine.has_unfinished_requests()
    assert "adapter" in str(refusal(lambda: llm.llm_engine.add_lora("adapter")))
    assert "weights" in str(refusal(lambda: llm.collective_rpc("reload_weights")))
    llm.wake_up(tags=["weights"])
    assert refusal(lambda: llm.generate(PROMPTS)).tags == ("kv_cache",)
    llm.collective_rpc("reload_weights")
    llm.wake_up()
    assert llm.generate(PROMPTS) == before
for level in (3, None):
    with raising(ConfigError):
        llm.sleep(level=level)
assert llm.generate(PROMPTS) == before
llm.shutdown()
"""
    )


def test_a_generation_that_the_engine_core_refuses_leaves_no_request_behind(run_vllm):
    """Another client has put the engine core to sleep."""
    run_vllm(
        START
        + """
call = llm.llm_engine.engine_core.call_utility
for _ in range(2):
    call("sleep", 1, "abort")
    refusal(lambda: llm.generate(PROMPTS * 2))
    assert not llm.llm_engine.has_unfinished_requests()
    call("wake_up", None)
    assert llm.generate(PROMPTS) == before
llm.shutdown()
""",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    )


def test_a_request_waits_for_a_wake_up_by_another_thread(blocking):
    blocking(
        """
llm.sleep()
begun = time.monotonic()
assert "within 2 s" in str(refusal(lambda: llm.generate(PROMPTS)))
assert time.monotonic() - begun >= 2
waker = threading.Timer(0.5, llm.wake_up)
waker.start()
assert llm.generate(PROMPTS) == before
waker.join()
llm.shutdown()
""",
        when="wait",
        wait=2,
    )


def test_a_wake_up_that_vllm_ignores_is_not_recorded(blocking):
    """vLLM ignores a wake-up of several tags if one of them is mapped."""
    blocking(
        """
llm.sleep()
llm.wake_up(tags=["weights"])
llm.wake_up(tags=["weights", "kv_cache"])
assert refusal(lambda: llm.generate(PROMPTS)).tags == ("kv_cache",)
llm.wake_up(tags=["kv_cache"])
assert llm.generate(PROMPTS) == before
llm.shutdown()
"""
    )


def test_an_interrupted_sleep_is_known_to_later_requests(run_vllm):
    run_vllm(
        START
        + """
import signal
from vllm_requests import blocked
busy = threading.Thread(target=llm.collective_rpc, args=(blocked,), kwargs={"args": (1.0,)})
busy.start()
time.sleep(0.2)
threading.Timer(0.2, os.kill, args=(os.getpid(), signal.SIGINT)).start()
with raising(KeyboardInterrupt):
    llm.sleep()
busy.join()
assert llm.llm_engine.is_sleeping()
assert llm.generate(PROMPTS) == before
llm.shutdown()
""",
        timeout=120,
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        MEMSAVER_VLLM_ASLEEP="wake",
    )


@pytest.mark.each_python
def test_a_request_wakes_the_engine(blocking):
    blocking(
        """
import asyncio
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)
for _ in range(2):
    llm.sleep()
    assert llm.generate(PROMPTS) == before
assert asyncio.get_event_loop() is loop
async def in_a_loop():  # as in a notebook
    return llm.generate(PROMPTS)
llm.sleep()
assert loop.run_until_complete(in_a_loop()) == before
llm.sleep(level=2)
assert "has no backup" in str(refusal(lambda: llm.generate(PROMPTS)))
llm.collective_rpc("reload_weights")  # wakes the weights
assert llm.generate(PROMPTS) == before
loop.close()
llm.shutdown()
""",
        when="wake",
    )


def test_a_wake_up_without_memory_refuses_the_request_and_the_engine_sleeps_on(blocking):
    blocking(
        """
llm.sleep()
free = llm.collective_rpc(vllm_calls.free)[0]
llm.collective_rpc(vllm_calls.occupy, args=(free - (1 << 20),))
error = refusal(lambda: llm.generate(PROMPTS))
assert isinstance(error.__cause__, OutOfDeviceMemoryError) and error.__cause__.needed
with raising(OutOfDeviceMemoryError) as caught:
    llm.wake_up()
assert caught.error.free < caught.error.needed
assert llm.llm_engine.is_sleeping()
llm.collective_rpc(vllm_calls.occupy, args=(0,))
assert llm.generate(PROMPTS) == before
llm.shutdown()
""",
        when="wake",
        wait=1,
    )


def test_ranks_with_an_engine_each_end_a_wake_up_without_memory_together(run_vllm):
    """If one rank repeated the wake-up alone, it would wait for the other ranks."""
    run_vllm(
        """
import multiprocessing, os, tempfile
from vllm_calls import generate_without_memory
context = multiprocessing.get_context("fork")
with tempfile.TemporaryDirectory() as folder:
    store = os.path.join(folder, "store")
    queues, both_failed = [context.Queue() for _ in range(2)], context.Event()
    ranks = []
    for rank, queue in enumerate(queues):
        args = store, rank, queue, both_failed
        ranks.append(context.Process(target=generate_without_memory, args=args, daemon=True))
        ranks[-1].start()
    for rank, queue in enumerate(queues):
        _, text = queue.get(timeout=20)
        assert "could not be woken" in text and "on rank 1 of 2" in text, text
    both_failed.set()
    assert [queue.get(timeout=20) for queue in queues] == [(0, len(PROMPTS)), (1, len(PROMPTS))]
    for process in ranks:
        process.join(20)
        """,
        MEMSAVER_VLLM_ASLEEP="wake",
        MEMSAVER_VLLM_ASLEEP_WAIT=2,
    )


def test_a_failed_sleep_keeps_its_error_if_the_query_of_the_state_fails_too(blocking):
    blocking(
        """
from memsaver.integrations.vllm import blocking_admissions
def failing(text):
    def call(*_, **__):
        raise RuntimeError(text)
    return call
llm.llm_engine.engine_core._call = failing("it failed")
blocking_admissions.memory_of = failing("no answer")
error = refused(RuntimeError, llm.sleep)
llm.shutdown()
assert str(error) == "it failed"
"""
    )


def test_without_memsaver_the_hooks_do_nothing(blocking):
    blocking(
        """
llm.sleep()
if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1":
    threading.Timer(0.5, llm.wake_up).start()  # the request waits in vLLM's scheduler
    answered = llm.generate(PROMPTS)
    assert answered == llm.generate(PROMPTS)
else:
    llm.wake_up()
llm.shutdown()
""",
        MEMSAVER_VLLM=0,
    )


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_an_image_of_a_request_that_was_not_sent_is_sent_with_the_next(run_vllm, version):
    run_vllm(
        """
from memsaver.integrations.engine.errors import EngineAsleepError
from vllm_requests import Renderer
llm = LLM(enable_sleep_mode=True)
llm.llm_engine.renderer = renderer = Renderer()
llm.sleep()
refused(EngineAsleepError, llm.generate, [renderer.render("A")])
assert not renderer.sent
llm.wake_up()
llm.generate([renderer.render("A")])
assert renderer.sent
llm.shutdown()
""",
        MEMSAVER_VLLM_ASLEEP="refuse",
        VLLM_FAKE_VERSION=version,
    )


def test_a_call_ends_with_an_engine_whose_worker_is_killed(run_vllm):
    run_vllm(
        START
        + """
import signal
from vllm.v1.engine.exceptions import EngineDeadError
(pid,) = llm.collective_rpc(vllm_calls.pid)
llm.sleep()
os.kill(pid, signal.SIGKILL)
with raising(Exception) as caught:
    llm.wake_up()
assert type(caught.error) is EngineDeadError or "wake_up" in str(caught.error), repr(caught.error)
deadline = time.monotonic() + 20
while not llm.llm_engine.engine_core.resources.engine_dead:
    assert time.monotonic() < deadline
    time.sleep(0.01)
for call in (llm.wake_up, lambda: llm.generate(PROMPTS)):
    with raising(EngineDeadError):
        call()
""",
        timeout=120,
        VLLM_ENABLE_V1_MULTIPROCESSING=1,
        BACKEND="mp",
    )


def test_a_call_ends_with_an_engine_core_that_ends_before_it_answers(run_vllm):
    run_vllm(
        """
import vllm_dead_core
from vllm.plugins import load_general_plugins
from vllm.v1.engine import core_client
load_general_plugins()
error = vllm_dead_core.error_of_a_call(core_client)
assert type(error) is core_client.EngineDeadError, repr(error)
"""
    )
