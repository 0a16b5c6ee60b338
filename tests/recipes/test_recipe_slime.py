"""Tests the engine actors and training actors of slime and miles, if installed, with memsaver."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
from framework_rounds import check_repeated, check_stages
from installed import needs, needs_sglang

pytestmark = pytest.mark.recipes

ENGINE = "backends.sglang_utils.sglang_engine"
NOT_ON_PYPI = "it is installed from its repository; projects of this name on PyPI are others"


@pytest.fixture(params=["slime", "miles"])
def framework(request):
    needs_sglang()
    needs(f"{request.param}.{ENGINE}", NOT_ON_PYPI)
    return request.param


@pytest.fixture
def actor(framework, engine):
    """Return the framework's actor for an engine whose server is already running."""
    owner = importlib.import_module(f"{framework}.{ENGINE}").SGLangEngine
    actor = object.__new__(owner)
    actor.node_rank, actor.server_host, actor.server_port = 0, engine.host, engine.port
    return actor


def test_an_engine_releases_memory_and_resumes_it_in_stages(actor, engine, sim):
    check_stages(
        engine,
        sim,
        actor.release_memory_occupation,
        lambda: actor.resume_memory_occupation(tags=["weights"]),
        lambda: actor.resume_memory_occupation(tags=["kv_cache", "cuda_graph"]),
    )


def test_repeated_requests_are_no_error(actor, engine):
    check_repeated(
        engine,
        actor.resume_memory_occupation,
        actor.release_memory_occupation,
        actor.release_memory_occupation,
        lambda: actor.resume_memory_occupation(tags=["weights"]),
        actor.resume_memory_occupation,
    )


def _slime(module, args):
    module.RayTrainGroup(args, 1, 1, (None, [0], [0]), actor_cls=object).create()


def _miles(module, args):
    module.allocate_gpus_for_actor(args, 1, (None, [0], [0]), 1, "", "actor", 0)


ARGUMENTS = {"train_env_vars": {}, "offload_train": True, "train_backend": "megatron"}
STARTS = {"slime": ("ray.actor_group", _slime), "miles": ("ray.train.actor_factory", _miles)}
TRAINERS = {
    "slime": {"use_routing_replay": False},
    "miles": {"offload_train_target": "cpu"},
    "miles, backups on disk": {
        "offload_train_target": "disk",
        "offload_train_disk_chunk_mb": 64,
    },
}


@pytest.mark.parametrize("name", TRAINERS)
def test_its_trainers_are_preloaded_with_memsaver(name, request, tmp_path, monkeypatch):
    """The environment that the framework sets for training actors preloads memsaver in a child
    process.
    """
    framework = name.partition(",")[0]
    needs_sglang()
    needs(f"{framework}.{ENGINE}", NOT_ON_PYPI)
    ray = pytest.importorskip("ray")
    dropin_site, run_dropin = map(request.getfixturevalue, ("dropin_site", "run_dropin"))
    monkeypatch.syspath_prepend(str(dropin_site))
    place, start = STARTS[framework]
    module = importlib.import_module(f"{framework}.{place}")
    megatron = ModuleType("the framework's trainer, which needs Megatron")
    megatron.MegatronTrainRayActor = object
    monkeypatch.setitem(sys.modules, f"{framework}.backends.megatron_utils.actor", megatron)
    given = {}

    def remote(**options):
        given.update(options["runtime_env"]["env_vars"])
        raise InterruptedError

    monkeypatch.setattr(ray, "remote", remote)
    more = {"dumper_source_patcher_config_train": None, "use_fault_tolerance": False}
    with pytest.raises(InterruptedError):
        start(module, SimpleNamespace(**ARGUMENTS, **more, **TRAINERS[name]))
    assert os.path.dirname(given["LD_PRELOAD"]) == str(dropin_site)
    run_dropin(
        """
        assert memsaver.is_preloaded()
        saver.memory_margin_bytes = 1 << 30
        assert os.environ["MEMSAVER_TAG"] == "default"
        saver.pause()
        with saver.disable():
            pass
        saver.resume()
        """,
        TMS_DISK_BACKUP_DIR=str(tmp_path),
        **{key: value for key, value in given.items() if key.startswith(("LD_", "TMS_"))},
    )
