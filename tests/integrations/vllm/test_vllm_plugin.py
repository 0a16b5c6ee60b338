"""Tests vLLM's plugin and the allocator that it installs in every process of an engine.

tests/fixtures/vllm_engine is a fake vLLM. The fake's processes find the plugin through the entry
point of the installed memsaver.
"""

import pytest

from memsaver.integrations.vllm import versions

MIB = 1 << 20
PROCESSES = {
    "in process": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    "engine core": {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    "worker": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "BACKEND": "mp",
    },
}
START = """
import os
llm = LLM(enable_sleep_mode=True, distributed_executor_backend=os.environ.get("BACKEND"))
"""
CYCLES = """
first = llm.generate(PROMPTS)
awake = llm.collective_rpc(vllm_calls.used)[0]
for _ in range(3):
    llm.sleep(level=1)
    assert not any(llm.collective_rpc(vllm_calls.resident)[0].values())
    assert llm.collective_rpc(vllm_calls.used)[0] < awake - 15 * (1 << 20)
    llm.wake_up(tags=["weights"])
    assert llm.collective_rpc(vllm_calls.resident)[0]["kv_cache"] == 0
    llm.wake_up(tags=["kv_cache"])
    assert llm.generate(PROMPTS) == first
assert llm.collective_rpc(vllm_calls.used)[0] <= awake
llm.shutdown()
"""


@pytest.mark.each_python
@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
@pytest.mark.parametrize("processes", PROCESSES)
def test_an_engine_sleeps_and_wakes_up_through_memsaver(run_vllm, processes, version):
    run_vllm(START + CYCLES, VLLM_FAKE_VERSION=version, **PROCESSES[processes])


@pytest.mark.parametrize("processes", PROCESSES)
def test_vllms_log_shows_once_that_memsaver_is_used(run_vllm, processes):
    """Only vLLM's own logger has a handler, and the root logger's level is WARNING."""
    done = run_vllm(f"{START}\nllm.sleep()\nllm.shutdown()", **PROCESSES[processes])
    assert done.stderr.count("is vLLM's sleep mode allocator in process") == 1


@pytest.mark.each_python
def test_without_sleep_mode_no_driver_is_opened(run_vllm):
    run_vllm(
        """
import sys
llm = LLM()
llm.generate(PROMPTS)
assert not any("libmemsaver_sim" in line for line in open("/proc/self/maps"))
assert "torch" not in sys.modules
assert "memsaver.integrations.vllm.plugin" in sys.modules
        """,
        fresh=True,
    )


OWN = """
from vllm.device_allocator.cumem import CuMemAllocator
llm = LLM(enable_sleep_mode=True)
llm.sleep()
llm.wake_up()
assert type(CuMemAllocator.instance) is CuMemAllocator
assert ("wake_up", None) in CuMemAllocator.instance.calls
from vllm.v1.worker.gpu_worker import Worker
assert not hasattr(Worker, "memsaver_state")
"""


@pytest.mark.parametrize(
    ("variables", "log"),
    [
        ({"MEMSAVER_VLLM": "0"}, ""),
        ({"VLLM_PLUGINS": "others"}, ""),
        ({"MEMSAVER_VLLM": "perhaps"}, "MEMSAVER_VLLM='perhaps' is not a flag"),
        ({"MEMSAVER_VLLM_ASLEEP": "never"}, "MEMSAVER_VLLM_ASLEEP='never' must be one of"),
        ({"MEMSAVER_VLLM_BACKUP": "bogus"}, "MEMSAVER_VLLM_BACKUP='bogus' is not a place for"),
        ({"MEMSAVER_VLLM_GRAPHS": "all"}, "MEMSAVER_VLLM_GRAPHS='all' is not a flag"),
        ({"VLLM_FAKE_VERSION": "0.99.0"}, "memsaver was not tested with vLLM 0.99.0"),
    ],
)
def test_vllms_own_allocator_stays(run_vllm, variables, log):
    done = run_vllm(OWN, **variables)
    assert log in done.stderr and ("memsaver" in done.stderr) == bool(log)


def test_vllms_own_allocator_stays_on_rocm(run_vllm):
    run_vllm(OWN.rsplit("assert", 1)[0], VLLM_FAKE_ROCM="1")


def test_an_untested_version_without_sleep_mode_logs_nothing(run_vllm):
    assert "memsaver" not in run_vllm("LLM().generate(PROMPTS)", VLLM_FAKE_VERSION="0.99.0").stderr


def test_an_unexpected_interface_leaves_vllms_own_allocator(run_vllm):
    done = run_vllm(
        """
import vllm.device_allocator.cumem as cumem
cumem.CuMemAllocator.compact = lambda self: None
from memsaver.integrations.vllm import plugin
plugin.load_plugin()
llm = LLM(enable_sleep_mode=True)
assert type(cumem.CuMemAllocator.instance) is cumem.CuMemAllocator
        """
    )
    assert "memsaver's allocator has no compact" in done.stderr


def test_sleep_mode_without_a_driver_is_a_typed_error(run_vllm):
    run_vllm(
        """
with raising(memsaver.NotLoadedError) as caught:
    LLM(enable_sleep_mode=True)
assert "MEMSAVER_VLLM=0" in str(caught.error)
        """,
        MEMSAVER_DRIVER="/nowhere/libcuda.so.1",
    )


def test_loaded_twice_in_a_process(run_vllm):
    run_vllm(
        f"""
from memsaver.integrations.vllm.plugin import load_plugin
load_plugin()
import vllm.v1.worker.gpu_worker
load_plugin()
{START}{CYCLES}
load_plugin()
        """
    )


def test_a_second_engine_in_the_process_is_refused_by_vllm_and_the_first_lives(run_vllm):
    run_vllm(
        f"""
{START}
with raising(AssertionError) as caught:
    LLM(enable_sleep_mode=True)
assert "one instance per process" in str(caught.error)
{CYCLES}
        """
    )


@pytest.mark.parametrize("asleep", [False, True])
def test_an_engine_can_follow_one_that_was_shut_down(run_vllm, asleep):
    run_vllm(
        f"""
first = LLM(enable_sleep_mode=True)
before = vllm_calls.used(None)
{"first.sleep()" if asleep else ""}
first.shutdown()
del first
assert not any(vllm_calls.resident(None).values())
{START}
assert vllm_calls.used(None) <= before
{CYCLES}
assert not any(vllm_calls.resident(None).values())
        """
    )


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("0.26.0", True),
        ("0.26.3", True),
        ("0.33.0+cu130", True),
        ("0.33.0.post1", True),
        ("0.26.0.dev3+g1234567", False),
        ("0.26.0rc1", False),
        ("0.2.6", False),
        ("1.0.0", False),
        ("unknown", False),
    ],
)
def test_which_versions_are_tested(version, is_tested):
    refusal = versions.refusal(version)
    assert (refusal is None) == is_tested
    assert is_tested or f"vLLM {version} " in refusal
