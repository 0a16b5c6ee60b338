"""Tests the controller and the backend with two kinds of fake vLLM engines, LLM and AsyncLLM."""

from __future__ import annotations

import pytest

START = """
import asyncio, threading, time
import vllm_calls
from memsaver.errors import ConfigError, InvalidStateError, OutOfDeviceMemoryError
from memsaver.integrations.engine.errors import (
    EngineAsleepError, EngineBusyError, EngineDiedError, EngineError, EngineTimeoutError,
)
from memsaver.integrations.engine.held import PARTS
from memsaver.integrations.engine.interface import Request
from memsaver.integrations.vllm import SleepController, Status
from memsaver.integrations.vllm.backend import backend_of
from memsaver.integrations.vllm.launch import launch
from memsaver.integrations.engine.placement import Placement
from memsaver.integrations.vllm.engines import connect

def rpc(function, *arguments):
    return backend.link.rpc(function, arguments, 30)

def requests(*prompts, tokens=4):
    return [Request(list(prompt), {"max_tokens": tokens}) for prompt in prompts]
"""
LLM = """
llm = LLM("tiny", enable_sleep_mode=True)
backend = backend_of(llm, timeout=30)
"""
ASYNC = """
backend = launch(
    Placement({{}}), None, {{"model": "tiny", "distributed_executor_backend": "uni"{more}}}, 100
)
"""
END = """
backend.close()
"""
LLM_END = "\nllm.shutdown()\n"


@pytest.fixture
def run_async(run_vllm):
    """Run lines with a `backend` for an AsyncLLM."""

    def run(lines, more="", **env):
        code = START + ASYNC.format(more=more and f", {more}") + lines + END
        # This process has not started a driver; test_vllm_rollout.py also spawns engines.
        return run_vllm(code, VLLM_FAKE_START="fork", **env)

    return run


@pytest.fixture
def run_core(run_vllm):
    """Run lines with an `llm` whose engine core, `core`, is in the same process."""

    def run(lines):
        start = 'llm = LLM("tiny", enable_sleep_mode=True)\n'
        start += "core = llm.llm_engine.engine_core.engine_core\n"
        run_vllm(START + start + lines + LLM_END, VLLM_ENABLE_V1_MULTIPROCESSING="0")

    return run


@pytest.fixture(params=["LLM", "LLM in this process", "AsyncLLM"])
def run(run_vllm, run_async, request):
    """Run lines of code once for each kind of engine; `backend` is that engine's backend."""
    if request.param == "AsyncLLM":
        return run_async

    def run(lines, **env):
        here = "0" if request.param == "LLM in this process" else "1"
        code = START + LLM + lines + END + LLM_END
        return run_vllm(code, VLLM_ENABLE_V1_MULTIPROCESSING=here, **env)

    return run


def test_an_engine_generates_sleeps_and_wakes_in_stages(run):
    run("""
control = backend.control
assert backend.tp_size == 1 and control.guarded and control.status is Status.AWAKE
first = backend.generate(requests([1, 2], [3]), 30)
assert [len(one.token_ids) for one in first] == [4, 4]
assert first[0].logprobs == [-0.5] * 4 and first[0].finish_reason == "length"
assert first[0] == backend.generate(requests([1, 2]), 30)[0] != first[1]
report = control.sleep()
assert control.status is Status.ASLEEP and report.bytes > 8 << 20
assert report.changed == ("kv_cache", "weights", "cuda_graph")
assert set(report.held) == set(PARTS) - {"context"}
assert report.held["tags"] == 0 < report.held["rest"]
assert control.sleep().steps == ()
asleep = refused(EngineAsleepError, backend.generate, requests([1]), 10)
assert asleep.tags == ("kv_cache", "weights", "cuda_graph")
with control.staged_wake() as reports:
    assert control.status is Status.WEIGHTS_ONLY
    control.check("update_weights")
    refused(EngineAsleepError, control.check, "generate")
assert control.status is Status.AWAKE and reports[0].changed == ("weights",)
assert backend.generate(requests([1, 2], [3]), 30) == first

# The tags sleep independently.
for tag, other, status in (
    ("kv_cache", "weights", Status.WEIGHTS_ONLY), ("weights", "kv_cache", Status.NO_WEIGHTS)
):
    assert control.sleep(tag).held == {}
    assert control.status is status and control.released == {tag}
    assert control.sleep(other).held["tags"] == 0
    assert control.status is Status.ASLEEP
    assert control.wake_up(other).held == {}
    assert control.status is status
    control.wake_up()
    assert control.status is Status.AWAKE
    assert backend.generate(requests([1, 2], [3]), 30) == first
with control.asleep("kv_cache"):
    assert control.refresh() is Status.WEIGHTS_ONLY
assert backend.generate(requests([1, 2], [3]), 30) == first
refused(ConfigError, control.sleep, "graphs")
""")


@pytest.mark.parametrize("tags", [("kv_cache", "weights"), ("weights", "kv_cache")])
def test_all_memory_is_released_after_the_weights_and_the_kv_cache(run_async, tags):
    run_async(
        f"""
control = backend.control
first = backend.generate(requests([1, 2]), 30)
[before] = rpc(vllm_calls.resident)
assert before["runtime"] and before["weights"]
for _ in range(2):
    control.sleep("{tags[0]}")
    assert rpc(vllm_calls.resident)[0]["runtime"] == before["runtime"]
    control.sleep("{tags[1]}")
    assert not any(rpc(vllm_calls.resident)[0].values())
    control.wake_up("{tags[0]}")
    assert rpc(vllm_calls.resident)[0]["runtime"] == before["runtime"]
    control.wake_up()
    assert rpc(vllm_calls.resident) == [before]
assert backend.generate(requests([1, 2]), 30) == first
""",
        VLLM_FAKE_VERSION="0.33.0",
    )


@pytest.mark.parametrize("run", ["LLM in this process"], indirect=True)  # is the workers' own
def test_a_connector_keeps_the_registration_of_a_mapped_kv_cache(run):
    run(
        """
control = backend.control
rpc(vllm_calls.connect)
assert rpc(vllm_calls.is_registered) == [True]
for level in (1, 2):
    control = SleepController(backend.link, level=level)
    control.sleep("weights", keep_weights=False)
    assert rpc(vllm_calls.is_registered) == [True]
    control.sleep("kv_cache")
    assert rpc(vllm_calls.is_registered) == [False]
    control.wake_up("weights")
    control.sleep("weights")
    assert rpc(vllm_calls.is_registered) == [False]
    control.wake_up()
    assert rpc(vllm_calls.is_registered) == [True]
    rpc(vllm_calls.break_next, "suspend")
    refused(EngineError, control.sleep, "weights")
    assert rpc(vllm_calls.is_registered) == [True] and control.refresh() is Status.AWAKE
""",
        VLLM_FAKE_VERSION="0.33.0",
    )


def test_a_sleep_and_a_wake_up_without_memory_leave_the_engine_whole(run):
    run(
        """
control = backend.control
first = backend.generate(requests([1, 2]), 30)
rpc(vllm_calls.limit_host, 1 << 16)
error = refused(Exception, control.sleep)
assert control.status is Status.AWAKE, (control.status, error)
rpc(vllm_calls.limit_host, 1 << 40)
backend.generate(requests([1, 2]), 30)
control.sleep()
rpc(vllm_calls.occupy, (1 << 40) - (4 << 20))
error = refused(OutOfDeviceMemoryError, control.wake_up)
assert error.needed > error.free, error
assert control.status is Status.ASLEEP
refused(EngineAsleepError, backend.generate, requests([1]), 10)
rpc(vllm_calls.occupy, 0)
control.wake_up()
assert control.status is Status.AWAKE
""",
        MEMSAVER_SIM_MEMORY=1 << 40,
    )


def test_requests_in_flight_keep_the_engine_awake_unless_they_are_aborted(run_async):
    run_async("""
control = backend.control
results = []
def generate(tokens):
    work = threading.Thread(
        target=lambda: results.append(backend.generate(requests([1, 2], tokens=tokens), 60))
    )
    work.start()
    while all(state.idle for state in backend.link.states(10)):
        time.sleep(0.002)
    return work

work = generate(100000)
refused(EngineBusyError, control.sleep)
refused(EngineBusyError, control.sleep, wait_idle=True, timeout=0.2)
assert control.status is Status.AWAKE and not results
other = connect(backend.link.engine)
refused(EngineBusyError, SleepController(other).sleep)  # which does not know of the request
control.sleep(abort=True)
work.join(20)
assert results.pop()[0].finish_reason == "abort" and control.status is Status.ASLEEP
control.wake_up()
work = generate(300)
control.sleep(wait_idle=True)
work.join(20)
assert len(results.pop()[0].token_ids) == 300
control.wake_up()
late = refused(EngineTimeoutError, backend.generate, requests([1], tokens=100000), 0.3)
deadline = time.monotonic() + 10
while not all(state.idle for state in backend.link.states(10)):
    assert time.monotonic() < deadline
    time.sleep(0.01)
""")


def test_generation_pauses_in_each_mode(run_async):
    run_async("""
for mode in ("abort", "in_place", "retract", "wait"):
    results = []
    tokens = 300 if mode == "wait" else 20000
    work = threading.Thread(
        target=lambda: results.append(backend.generate(requests([1, 2], tokens=tokens), 60))
    )
    work.start()
    while all(state.idle for state in backend.link.states(10)):
        time.sleep(0.002)
    backend.pause_generation(mode, 30)
    if mode in ("abort", "wait"):
        work.join(10)
        [[sample]] = results
        assert sample.finish_reason == {"abort": "abort", "wait": "length"}[mode]
        assert bool(sample.token_ids)
    else:
        time.sleep(0.1)
        assert not results
        assert backend.link.flush(10) == (mode == "retract")
        other = SleepController(connect(backend.link.engine))
        if mode == "in_place":
            refused(EngineBusyError, other.sleep)
        else:
            other.sleep()
            other.wake_up()
        backend.link.abort(10)
        work.join(10)
        assert results[0][0].finish_reason == "abort"
    backend.continue_generation(30)
    assert len(backend.generate(requests([5]), 30)[0].token_ids) == 4
refused(ConfigError, backend.pause_generation, "stop", 10)
""")


def test_an_abort_ends_held_generations_even_if_none_was_sent(run_async):
    run_async(
        """
control = SleepController(connect(backend.link.engine))
control.sleep()
results = []
def generate():
    try:
        results.append(backend.generate(requests([1]), 30))
    except Exception as error:
        results.append(error)
work = threading.Thread(target=generate)
work.start()
time.sleep(0.5)
assert not results
backend.link.abort(10)
work.join(5)
assert results and "abort" in str(results), results
control.wake_up()
""",
        MEMSAVER_VLLM_ASLEEP="wait",
    )


def test_a_dead_engine_is_reported(run_async):
    run_async("""
assert backend.death() == ""
[process] = backend.link.engine.engine_core.resources.engine_manager.processes
process.kill()
process.join()
assert "exited" in backend.death(), backend.death()
refused(EngineDiedError, backend.control.refresh)
refused(EngineDiedError, backend.generate, requests([1]), 30)
refused(EngineDiedError, backend.begin_update, 10)
""")


def test_a_rank_that_dies_ends_the_engine_and_every_call(run_async):
    run_async(
        """
import os, signal
from memsaver.integrations.vllm.protocol import LOAD
[process] = backend.link.engine.engine_core.resources.engine_manager.processes
assert backend.tp_size == 2
pids = [one["pid"] for one in backend.link.rpc("memsaver_begin_update", [], 30)[0]]
assert len(set(pids)) == 2
os.kill(pids[1], signal.SIGKILL)
error = refused(EngineError, backend.link.rpc, "memsaver_end_update", [], 60)
deadline = time.monotonic() + 30
while not backend.death():
    assert time.monotonic() < deadline
    time.sleep(0.05)
refused(EngineDiedError, backend.control.refresh)
""",
        more='"tensor_parallel_size": 2, "distributed_executor_backend": "mp"',
    )


def test_a_call_inside_an_event_loop_is_refused(run_async):
    run_async("""
async def inside():
    refused(InvalidStateError, backend.control.sleep)
    report = await asyncio.to_thread(backend.control.sleep)
    return report.changed

assert "weights" in asyncio.run(inside())
""")


@pytest.mark.parametrize("run", ["LLM in this process"], indirect=True)  # is the same code
def test_arguments_are_checked(run):
    run("""
refused(ConfigError, backend.generate, [Request([1], {"temperature": -1.0})], 10)
refused(ConfigError, backend.generate, [Request([1], {"max_new_tokens": 1})], 10)
refused(ConfigError, connect, object())
refused(ConfigError, SleepController, backend.link, level=3)
refused(ConfigError, backend.control.sleep, timeout=0)
""")


def test_a_failed_sleep_drops_the_front_ends_inputs_too(run):
    """The engine core drops its inputs before the memory is released."""
    run("""
calls, call = [], backend.link.call
backend.link.call = lambda name, *arguments: (calls.append(name), call(name, *arguments))[1]
rpc(vllm_calls.break_next, "suspend")
refused(Exception, backend.control.sleep)
assert "reset_mm_cache" in calls
""")


@pytest.mark.parametrize("tags", [["kv_cache", "weights", "cuda_graph"], ["weights"]])
def test_a_release_waits_until_the_scheduler_has_finished_its_pause(run_core, tags):
    run_core(
        f"tags = {tags}\n"
        """
from concurrent.futures import Future
pause = core.pause_scheduler
pending = Future()
def pause_later(*arguments, **named):
    pause(*arguments, **named)
    return pending
core.pause_scheduler = pause_later
llm.collective_rpc(vllm_calls.limit_host, args=(1 << 10,))
answers = core.collective_rpc("memsaver_release", args=(tags, 1))
pending.set_result(None)
[answer] = answers.result()
assert answer["failure"]["kind"] == "OutOfHostMemoryError", answer
assert not core.is_sleeping() and not answer["released"]
llm.collective_rpc(vllm_calls.limit_host, args=(1 << 40,))
pending = Future()
answers = core.collective_rpc("memsaver_release", args=(tags, 1))
assert not answers.done() and not core.model_executor.is_sleeping
pending.set_result(None)
[answer] = answers.result()
assert answer["failure"] is None and set(tags) <= {*answer["released"], "cuda_graph"}
assert core.is_sleeping() and "weights" in core.model_executor.sleeping_tags
core.wake_up()
assert not core.is_sleeping()
"""
    )


def test_a_replica_of_a_mixture_of_experts_is_not_released(run_core):
    """The pause would end only after the pauses of all other replicas, which might be busy."""
    run_core("""
first = llm.generate(PROMPTS)
core.dp_group = object()
control = SleepController(llm)
for tags in (None, "weights"):
    refused(ConfigError, control.sleep, tags)
    assert control.refresh() is Status.AWAKE and not core.is_scheduler_paused()
assert llm.generate(PROMPTS) == first
""")


def test_a_release_of_the_graphs_alone_leaves_the_scheduler_as_it_was(run_core):
    run_core("""
for pause in (lambda: None, lambda: core.pause_scheduler("keep")):
    pause()
    before = core.is_scheduler_paused()
    [answer] = core.collective_rpc("memsaver_release", args=(["cuda_graph"], 1))
    assert answer["failure"] is None and core.is_scheduler_paused() == before
""")
