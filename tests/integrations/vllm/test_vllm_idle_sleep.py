"""Tests that an idle vLLM engine releases its memory after a given time."""

import queue
from types import SimpleNamespace

import pytest

from memsaver.integrations.vllm.idle_sleep import IdleSleep


@pytest.mark.each_python
def test_an_idle_engine_sleeps_and_the_next_request_wakes_it(asleep):
    asleep(
        """
async def memory():
    return any((await engine.collective_rpc(vllm_calls.resident))[0].values())
before = await generate(engine)
for _ in range(2):
    await until(engine.is_sleeping)
    assert not await memory()
    assert await generate(engine) == before
    assert not await engine.is_sleeping()
await engine.pause_generation(mode="keep")
await asyncio.sleep(2)
assert await memory()  # of a paused engine
await engine.resume_generation()
assert await generate(engine) == before
""",
        when="wake",
        after=1,
    )


def test_each_data_parallel_engine_core_sleeps_by_itself(asleep):
    asleep(
        """
before = [await generate(engine) for _ in range(2)]
client = engine.engine_core
def sleeps(core):
    return lambda: client._call_utility_async("is_sleeping", engine=core)
await until(sleeps(0))
await until(sleeps(1))
assert [await generate(engine) for _ in range(4)] == before * 2
""",
        engine="engine_of(data_parallel_size=2)",
        when="wake",
        after=1,
    )


def test_an_llm_sleeps_while_it_is_idle(run_vllm):
    run_vllm(
        """
import time
llm = LLM(enable_sleep_mode=True)
before = llm.generate(PROMPTS)
for _ in range(2):
    end = time.monotonic() + 30
    while not llm.llm_engine.is_sleeping():
        assert time.monotonic() < end
        time.sleep(0.1)
    assert llm.generate(PROMPTS) == before
llm.shutdown()
""",
        timeout=120,
        VLLM_ENABLE_V1_MULTIPROCESSING=1,
        MEMSAVER_VLLM_ASLEEP="wake",
        MEMSAVER_VLLM_SLEEP_AFTER=1,
    )


class Core:
    """An idle engine core without a loop."""

    def __init__(self):
        self.input_queue = queue.Queue()
        self.model_executor = SimpleNamespace(is_sleeping=False, sleep=self.sleep)
        self.paused = self.busy = False
        self.failure = None
        self.slept = []

    def sleep(self, level):
        if self.failure is not None:
            raise self.failure
        self.slept.append(level)
        self.model_executor.is_sleeping = True

    def pause_scheduler(self, mode, clear_cache):
        self.paused = True

    def resume_scheduler(self):
        self.paused = False

    def is_scheduler_paused(self):
        return self.paused

    def reset_prefix_cache(self):
        return True

    def has_work(self):
        return self.busy

    def is_running(self):
        return True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def idle():
    core, clock = Core(), Clock()
    made = IdleSleep(core, 5, clock)
    made.wait_begins()
    return core, made, clock


def test_requests_postpone_a_release_and_queries_do_not(idle):
    _, made, clock = idle
    clock.now += 4
    made.received("UTILITY", (0, 1, "is_sleeping", ()))
    made.received("UTILITY", (0, 1, "collective_rpc", ("memsaver_state",)))
    assert made.left == 1
    made.received("UTILITY", (0, 1, "collective_rpc", ("update_weights",)))
    assert made.left == 5
    made.received("ADD", None)
    clock.now += 30  # a long generation
    made.wait_begins()
    assert made.left == 5
    clock.now += 2
    made.wait_begins()  # after a query
    assert made.left == 3
    made.received("UTILITY", (0, 1, "collective_rpc", ("update_weights",)))
    clock.now += 30  # a long call
    made.wait_begins()
    assert made.left == 5


def test_a_failed_release_is_retried_after_the_same_time(idle):
    core, made, clock = idle
    core.failure = MemoryError("no host memory")
    clock.now += 5
    made.release()
    assert not core.slept and not core.paused and made.left == 5
    core.failure = None
    clock.now += 5
    made.release()
    assert core.slept == [1]


def test_a_request_that_arrives_first_prevents_the_release(idle):
    core, made, clock = idle
    clock.now += 5
    core.busy = True
    made.release()
    assert not core.slept and not core.paused


def test_engines_that_cannot_sleep_alone_keep_their_memory(caplog):
    config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
    core = Core()
    core.vllm_config = config
    assert IdleSleep.of(core, 0) is None
    assert IdleSleep.of(core, 5) is not None
    config.model_config.enable_sleep_mode = False
    assert IdleSleep.of(core, 5) is None and not caplog.messages
    config.model_config.enable_sleep_mode = True
    core.dp_group = object()  # a model with experts
    assert IdleSleep.of(core, 5) is None and "model has experts" in caplog.messages[0]
    assert IdleSleep.of(SimpleNamespace(vllm_config=config), 5) is None  # in the caller's process
    assert "set VLLM_ENABLE_V1_MULTIPROCESSING=1" in caplog.messages[1]
