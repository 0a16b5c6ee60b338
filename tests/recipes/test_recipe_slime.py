"""Test slime's own engine actor and trainer group with memsaver, if slime is installed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from framework_rounds import check_repeated, check_stages
from installed import needs, needs_sglang

pytestmark = pytest.mark.recipes

NOT_ON_PYPI = "it is installed from its repository; slime on PyPI is another project"


@pytest.fixture
def actor(engine):
    """Return slime's actor for an engine whose server is already running."""
    from slime.backends.sglang_utils.sglang_engine import SGLangEngine

    actor = object.__new__(SGLangEngine)
    actor.node_rank, actor.server_host, actor.server_port = 0, engine.host, engine.port
    return actor


@pytest.fixture
def installed():
    needs_sglang()
    needs("slime.backends.sglang_utils.sglang_engine", NOT_ON_PYPI)


def test_an_engine_releases_memory_and_resumes_it_in_stages(installed, actor, engine, sim):
    check_stages(
        engine,
        sim,
        actor.release_memory_occupation,
        lambda: actor.resume_memory_occupation(tags=["weights"]),
        lambda: actor.resume_memory_occupation(tags=["kv_cache", "cuda_graph"]),
    )


def test_repeated_requests_are_no_error(installed, actor, engine):
    check_repeated(
        engine,
        actor.resume_memory_occupation,
        actor.release_memory_occupation,
        actor.release_memory_occupation,
        lambda: actor.resume_memory_occupation(tags=["weights"]),
        actor.resume_memory_occupation,
    )


def test_its_trainers_are_preloaded_with_memsaver(request, monkeypatch):
    """The environment that slime sets for its training actors preloads memsaver in a child."""
    needs("slime.ray.actor_group", NOT_ON_PYPI)
    ray = pytest.importorskip("ray")
    dropin_site, run_dropin = map(request.getfixturevalue, ("dropin_site", "run_dropin"))
    from slime.ray import actor_group

    monkeypatch.syspath_prepend(str(dropin_site))
    given = {}

    def remote(**options):
        given.update(options["runtime_env"]["env_vars"])
        raise InterruptedError

    monkeypatch.setattr(ray, "remote", remote)
    args = SimpleNamespace(
        train_env_vars={}, offload_train=True, train_backend="megatron", use_routing_replay=False
    )
    group = actor_group.RayTrainGroup(args, 1, 1, (None, [0], [0]), actor_cls=object)
    with pytest.raises(InterruptedError):
        group.create()
    assert os.path.dirname(given["LD_PRELOAD"]) == str(dropin_site)
    wanted = ("LD_PRELOAD", "TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP")
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
        **{name: given[name] for name in wanted},
    )
