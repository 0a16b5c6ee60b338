"""Tests replicas with data-parallel attention that receive a request in different loop iterations.

SGLang's option for such replicas is `enable_dp_attention_local_control_broadcast`.
"""

from __future__ import annotations

import sys
import textwrap
from types import SimpleNamespace

import fake_sglang
import pytest
import rank_processes
from scheduler_calls import ask, states

import memsaver
from memsaver.integrations.engine.messages import error_of
from memsaver.integrations.sglang.places import LOCAL_CONTROL

OPTIONS = {"enable_dp_attention": True, LOCAL_CONTROL: True}


@pytest.fixture(params=fake_sglang.HANDLERS)
def version(request):
    return request.param


def as_arguments(engine, patch):
    engine.server_args = SimpleNamespace(**OPTIONS)


def as_sglangs_own_decision(engine, patch):
    """SGLang 0.5.23 sets the options automatically, for example for elastic expert parallelism."""
    engine.server_args = SimpleNamespace(enable_dp_attention=False, pp_size=1)
    decided = SimpleNamespace(attn_dp_enabled=True, **{LOCAL_CONTROL: True})
    module = sys.modules[type(engine).__module__]
    patch.setattr(module, "get_parallel", lambda: decided, raising=False)


@pytest.mark.parametrize("set_options", [as_arguments, as_sglangs_own_decision])
def test_a_release_is_refused_and_changes_nothing(engine, monkeypatch, set_options):
    set_options(engine, monkeypatch)
    for tags in (None, ["kv_cache"], ["weights"]):
        answer = ask(engine, "release", tags)
        error = error_of([answer])
        assert isinstance(error, memsaver.ConfigError)
        assert LOCAL_CONTROL in str(error) and "turn the option off" in str(error)
        assert set(states().values()) == {"mapped"} and answer.released == ()
    assert engine.flushed == 0 and engine.handlers.offload_tags == set()
    assert ask(engine, "resume").failure is None  # of mapped tags: there is nothing to do
    assert engine.model.is_intact() and engine.kv.is_intact() and engine.graph.is_intact()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_release_needs_only_one_of_the_options_to_be_off(engine, option):
    engine.server_args = SimpleNamespace(**{**OPTIONS, option: False})
    assert ask(engine, "release").failure is None and set(states().values()) == {"paused"}


# The other rank makes none of these calls: it would receive the requests in a later round.
REPLICA = """
    import datetime, types
    import pytest, torch, torch.distributed as dist
    import fake_sglang, weight_engine
    import memsaver
    from memsaver.integrations.sglang import hooks
    from scheduler_calls import ask

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in range(2)][rank]
    arguments = types.SimpleNamespace(
        pp_size=STAGES, enable_dp_attention=True, enable_dp_attention_local_control_broadcast=True
    )
    patch = pytest.MonkeyPatch()
    if rank == 0:
        with fake_sglang.modules(patch) as classes:
            hooks.install()
            scheduler = classes.Scheduler(classes.Updater, group=dist.group.WORLD)
            scheduler.server_args, scheduler.attn_tp_cpu_group = arguments, alone
            scheduler.ps = types.SimpleNamespace(pp_rank=0)
            for _ in range(2):
                answer = ask(scheduler, "release")
                assert answer.failure.kind == "ConfigError", answer
                assert ask(scheduler, "resume").failure is None
        with weight_engine.hooked(patch) as manager:
            rank = manager(weight_engine.Model(), group=dist.group.WORLD)
            rank.scheduler.server_args, rank.scheduler.attn_tp_cpu_group = arguments, alone
            rank.scheduler.ps = types.SimpleNamespace(pp_rank=0)
            named = weight_engine.checkpoint()
            # Another replica may have the expert that this one does not use.
            named["layer.9.expert"] = torch.ones(2)
            request = weight_engine.Request(tensors=list(named.items()))
            output = rank.update_weights_from_distributed(request)
            assert output.success and rank.runner.model.holds(named), output
            request.tensors = [("embed.weight", torch.zeros(3, 3))]
            output = rank.update_weights_from_distributed(request)
            assert not output.success and "a vocabulary of 3" in output.message
    dist.barrier()
    print("done")
"""


@pytest.mark.parametrize("stages", [1, 2])
def test_a_replica_answers_without_the_others(tmp_path, stages):
    pytest.importorskip("torch")
    code = textwrap.dedent(REPLICA).replace("STAGES", str(stages))
    outputs = rank_processes.run(code, 2, tmp_path, timeout=60)
    assert all(output.endswith("done\n") for output in outputs)
