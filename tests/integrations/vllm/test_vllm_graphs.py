"""Tests the pool into which vLLM captures its CUDA graphs."""

import sys
from types import SimpleNamespace

import pytest

from memsaver.integrations.vllm import graphs
from memsaver.integrations.vllm.allocator import MemsaverAllocator

VLLMS, OURS = (0, 1), (0, 7)


@pytest.fixture
def platform():
    """Create a vLLM platform with the hook."""

    class Platform:
        def get_global_graph_pool(self):
            return VLLMS

    graphs.install(Platform)
    graphs.install(Platform)
    return Platform()


@pytest.fixture
def allocator(monkeypatch):
    """Make memsaver the allocator of this process, with a pool that requires no GPU."""
    found = MemsaverAllocator()
    found._graphs = SimpleNamespace(id=OURS)
    owner = SimpleNamespace(CuMemAllocator=SimpleNamespace(instance=found))
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.cumem", owner)
    return found


def has_custom_all_reduce(monkeypatch, *, disabled):
    """Add vLLM's custom all-reduce to the worker's tensor-parallel group."""
    communicator = SimpleNamespace(ca_comm=SimpleNamespace(disabled=disabled))
    state = SimpleNamespace(_TP=SimpleNamespace(device_communicator=communicator))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)


def test_graphs_are_captured_into_the_allocators_pool(platform, allocator):
    assert platform.get_global_graph_pool() == OURS
    with allocator.cudagraph_pool() as pool:
        assert pool == OURS


def test_without_the_allocator_graphs_stay_in_vllms_pool(platform):
    assert platform.get_global_graph_pool() == VLLMS


@pytest.mark.parametrize(("disabled", "pool"), [(False, VLLMS), (True, OURS)])
def test_graphs_that_other_ranks_read_stay_in_vllms_pool(
    platform, allocator, monkeypatch, disabled, pool
):
    """Custom all-reduce exports graph memory, which CUDA permits only for cudaMalloc memory."""
    has_custom_all_reduce(monkeypatch, disabled=disabled)
    assert platform.get_global_graph_pool() == pool


@pytest.mark.parametrize("processes", [0, 1])
def test_the_graphs_are_not_released_without_other_memory(run_vllm, processes):
    """The scheduler's next batch uses the graphs' memory."""
    run_vllm(
        """
from memsaver.errors import ConfigError
from memsaver.integrations.vllm import SleepController, Status
def add_graphs(worker):
    import memsaver
    from memsaver import simulator
    from memsaver.integrations.vllm.worker import installed_allocator
    installed_allocator()._tags.setdefault("cuda_graph")
    with memsaver.region("cuda_graph", backup="host"):
        memory = simulator.buffer(1 << 20).array
    runner = worker.model_runner
    run = runner.execute_model
    def execute_model(prompt):
        memory[:4] = b"step"
        return run(prompt)
    runner.execute_model = execute_model
llm = LLM(enable_sleep_mode=True)
controller = SleepController(llm)
assert controller.sleep("cuda_graph").changed == ("cuda_graph",)  # there are none
assert controller.refresh() is Status.AWAKE
llm.collective_rpc(add_graphs)
before = llm.generate(PROMPTS)
assert "together with" in str(refused(ConfigError, controller.sleep, "cuda_graph"))
assert controller.status is Status.AWAKE and llm.generate(PROMPTS) == before
for other in ("kv_cache", "weights"):
    for tags in (["cuda_graph", other], [other, "cuda_graph"]):
        for tag in tags if tags[0] == other else [tags]:
            controller.sleep(tag)
        assert controller.released == {"cuda_graph", other}
        controller.wake_up(other)  # and the graphs
        assert controller.refresh() is Status.AWAKE and llm.generate(PROMPTS) == before
llm.shutdown()
        """,
        MEMSAVER_VLLM_GRAPHS=1,
        VLLM_ENABLE_V1_MULTIPROCESSING=processes,
    )


@pytest.mark.parametrize("value", ["0", "1"])
def test_the_platform_is_hooked_only_on_request(run_vllm, value):
    run_vllm(
        f"""
import os
LLM()
from vllm.platforms.interface import Platform
assert hasattr(Platform.get_global_graph_pool, "__wrapped__") == ({value} == 1)
assert os.environ.get("NCCL_GRAPH_REGISTER") == ("0" if {value} else None)
        """,
        MEMSAVER_VLLM_GRAPHS=value,
        NCCL_GRAPH_REGISTER=None,
    )
