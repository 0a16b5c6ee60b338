"""Tests xtuner's own SGLang worker with memsaver, if xtuner's RL part is installed."""

from __future__ import annotations

import pytest
from framework_rounds import check_repeated, check_stages, states
from installed import needs, needs_sglang

import memsaver

pytestmark = pytest.mark.recipes


@pytest.fixture
def worker(engine):
    """Return a worker whose server is already running."""
    from xtuner.v1.rl.rollout.sglang import SGLangWorker

    worker = object.__new__(SGLangWorker)
    worker.server_url = engine.url
    return worker


@pytest.fixture(scope="module", autouse=True)
def xtuner():
    needs_sglang()  # before transformers is imported, which looks for absent packages once
    needs("xtuner.v1.rl.rollout.sglang", "xtuner's RL part is in its repository, not on PyPI")


def test_a_worker_releases_memory_and_resumes_it_in_stages(worker, engine, sim):
    check_stages(engine, sim, worker.offload, worker.onload_weights, worker.onload_kvcache)


def test_repeated_requests_are_no_error(worker, engine):
    check_repeated(
        engine,
        worker.onload_weights,
        worker.offload,
        worker.reset_prefix_cache,  # releases again
        worker.onload_kvcache,
        worker.onload_weights,
        worker.onload_weights,
    )


def test_a_resume_without_room_is_an_error_and_can_be_repeated(worker, engine, sim):
    requests = pytest.importorskip("requests")
    worker.offload()
    sim.occupy(memsaver.device_memory(0)[0])
    with pytest.raises(requests.HTTPError, match="400"):
        worker.onload_weights()
    assert states() == {"kv_cache": "paused", "weights": "paused"}
    sim.occupy(0)
    worker.onload_weights()
    worker.onload_kvcache()
    assert engine.scheduler.weights.is_intact()
