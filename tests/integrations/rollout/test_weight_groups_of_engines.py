"""Tests a process group that sends weights to several engines; either all engines or none receive
them."""

import threading
import time
from types import SimpleNamespace

import pytest
from weight_engine import Backend

from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.rollout import EngineSet, RolloutEngine, WeightGroup, engine_set

COMMON = """
from dataclasses import replace
from refusals import raises
from remote_engines import Remote, serve
from memsaver.integrations.engine.errors import EngineDiedError
from memsaver.integrations.rollout import EngineSet, engine_set
from memsaver.integrations.rollout.weights import disaggregated, sender
for module in (disaggregated, sender, engine_set):
    patch.setattr(module, "END_SECONDS", 1)
torch.ones(1).share_memory_()  # its helper process would inherit the sockets of a group

def end():
    # Ends ranks of which one has died, so that they cannot wait in a barrier.
    time.sleep(RANK == 0)  # which has the others' store
    print("fine", flush=True)
    os._exit(0)
"""

# Rank 0 is a trainer; the others are engines of one rank each.
SET = (
    COMMON
    + """
if RANK > 0:
    serve(f"engine{RANK}", Manager)
else:
    backends = [Remote(f"engine{rank}", Manager) for rank in range(1, SIZE)]
    engines = EngineSet([RolloutEngine(one, timeout=60) for one in backends])
    def holding(seed):
        return [one.order("holds", seed)[0] for one in backends if not one.dies]
"""
)


def test_a_bucket_is_broadcast_once_to_the_engines_of_a_set(run_ranks):
    run_ranks(3, SET)("""
    with WeightGroup(engines, backend="gloo", timeout=30) as group:
        sends = []
        real = group._sender.send
        patch.setattr(group._sender, "send", lambda *a: (sends.append(1), real(*a)))
        for seed in (1, 2):
            report = engines.update_weights(checkpoint(seed), group=group, pause="retract",
                                            verify="full", bucket_bytes=700, version=str(seed))
            assert report.held == report.received == 13, report
            assert holding(seed) == [True, True]
        assert len(sends) == 2 * report.buckets
        assert [one.version for one in backends] == ["2", "2"]
        assert all(one.calls[0] == "pause retract" for one in backends)
        assert all(one.calls[-1] == "continue" for one in backends)
        # Only one engine's memory differs: the update fails, and the error says whose.
        name = "layers.0.norm.weight"
        backends[1].load_weights = lambda load, real=backends[1].load_weights: [
            replace(one, differing=(name,)) for one in real(load)]
        with pytest.raises(WeightMismatchError, match="engine 2 of 2") as caught:
            engines.update_weights(checkpoint(3), group=group, verify="full")
        assert caught.value.tensors == (name,)
        del backends[1].load_weights
        engines.update_weights(checkpoint(3), group=group, verify="full")
        assert holding(3) == [True, True]
        # A group belongs to its engines, and a set needs one.
        for one, options in ((engines, {}), (engines.engines[0], {"group": group})):
            assert "group" in raises(ConfigError, one.update_weights, checkpoint(3), **options)
    for one in backends:
        one.order("end")
""")


def test_an_engine_of_a_set_that_fails_ends_the_update_of_all(run_ranks):
    """The other engines would wait in the broadcast for the failed engine's ranks."""
    run_ranks(4, SET)("""
    for kind, expected in (("refuses", EngineError), ("dies", EngineDiedError)):
        group = WeightGroup(engines, backend="gloo", timeout=30)
        engines.update_weights(checkpoint(1), group=group, verify="full")
        setattr(backends[1], kind, True)
        began = time.monotonic()
        with pytest.raises(expected, match="engine 2 of 3: "):
            engines.update_weights(checkpoint(2), group=group, verify="full", timeout=120)
        assert time.monotonic() - began < 60  # the timeout of a broadcast is 120 s
        group.leave()  # the engine that failed has left it
        # The others receive weights in a new group.
        if kind == "dies":
            backends.pop(1)
            engines = EngineSet([one for at, one in enumerate(engines.engines) if at != 1])
        else:
            backends[1].refuses = False
        with WeightGroup(engines, backend="gloo", timeout=30) as group:
            engines.update_weights(checkpoint(3), group=group, verify="full")
            assert all(holding(3))
    for one in backends:
        one.order("end")
end()
""")


# Ranks 0 and 1 are a trainer, a mesh of two engines; ranks 2 and 3 are the engines' ranks.
MESH = (
    COMMON
    + """
trainers = dist.new_group([0, 1])
if RANK > 1:
    serve(f"engine{RANK - 2}", Manager)
else:
    from torch.distributed.device_mesh import DeviceMesh
    mesh = DeviceMesh.from_group(trainers, "cpu", mesh_dim_names=("dp",))
    backend = Remote(f"engine{RANK}", Manager)
    engine = RolloutEngine(backend, layout_of(mesh), timeout=60)
"""
)


def test_the_engines_of_a_mesh_receive_one_broadcast(run_ranks):
    run_ranks(4, MESH)("""
    with WeightGroup(engine, backend="gloo", timeout=30, whole_mesh=True) as group:
        assert (group._sender is not None) == (RANK == 0)
        for seed in (1, 2):
            shards = sharded(checkpoint(seed), mesh, lambda n, t: [Shard(0)])
            report = update(engine, shards, group=group, pause="retract", verify="full",
                            bucket_bytes=700)
            assert report.held == report.received == 13 and report.buckets > 3
            assert backend.order("holds", seed)[0]
    with pytest.raises(InvalidStateError, match="has left the group"):
        update(engine, shards, group=group)
    # All ranks of the mesh make the same kind of group.
    for name, values, text in (
        ("backend", ["nope", "gloo"], "backend must be one of"),
        ("backend", ["nccl", "gloo"], "backend must be equal on all ranks"),
        ("timeout", ["soon", 30], "timeout must be a positive number"),
        ("whole_mesh", [True, False], "it is True on rank 0, False on rank 1"),
    ):
        given = {"backend": "gloo", "timeout": 30, "whole_mesh": True, name: values[RANK]}
        assert text in raises(ConfigError, WeightGroup, engine, **given), name
    backend.order("end")
""")


@pytest.mark.parametrize("which", [0, 1])
def test_an_engine_of_a_mesh_that_fails_ends_the_update_of_all(run_ranks, which):
    run_ranks(4, f"which = {which}", MESH)("""
    for kind in ("refuses", "dies"):
        group = WeightGroup(engine, backend="gloo", timeout=30, whole_mesh=True)
        if RANK == which:
            setattr(backend, kind, True)
        began = time.monotonic()
        with pytest.raises((EngineError, RankError), match=f"rank {which} ") as caught:
            update(engine, checkpoint(2), group=group, verify="full", timeout=120)
        cause = {"dies": "its process ended", "refuses": "the engine refused"}[kind]
        assert cause in str(caught.value)
        assert which in caught.value.failures, caught.value
        assert time.monotonic() - began < 60  # the timeout of a broadcast is 120 s
        try:
            group.leave()
        except (EngineError, RankError) as error:
            assert kind == "dies" and f"rank {which} " in str(error), error
        if kind == "refuses":
            backend.refuses = False
            with WeightGroup(engine, backend="gloo", timeout=30, whole_mesh=True) as group:
                update(engine, checkpoint(3), group=group, verify="full")
                assert backend.order("holds", 3)[0]
    if not backend.dies:
        backend.order("end")
    dist.barrier(trainers)
end()
""")


def test_a_set_needs_different_engines_of_the_same_ranks():
    one = RolloutEngine(Backend(), timeout=5)
    for given in ([], [one, one], [one, "http://a"], one, None):
        with pytest.raises(ConfigError, match="EngineSet"):
            EngineSet(given)
    assert repr(EngineSet([one])) == "<memsaver EngineSet: 1 engines, 1 ranks>"


def test_an_engine_leaves_a_group_that_another_engine_cannot_join():
    class Joining(Backend):
        def __init__(self, joins):
            super().__init__(size=0)
            self.joins, self.groups = joins, set()

        def join_group(self, group, timeout):
            if not self.joins:
                raise EngineError("cannot join")
            self.groups.add(group.name)

        def leave_group(self, name, timeout):
            if name not in self.groups:
                raise EngineError("not in the group")
            self.groups.remove(name)

    backends = [Joining(True), Joining(False), Joining(True)]
    engines = EngineSet([RolloutEngine(one, timeout=20) for one in backends])
    with pytest.raises(EngineError, match="engine 2 of 3: cannot join"):
        WeightGroup(engines, backend="gloo", timeout=20)
    assert not any(one.groups for one in backends)


def backends_of(*checks):
    """Return the backend of a set of engines that run these checks."""
    engines = [
        SimpleNamespace(
            tp_size=1, timeout=60, _engine=SimpleNamespace(control=SimpleNamespace(check=check))
        )
        for check in checks
    ]
    return engine_set._Backends(engines)


def test_a_check_may_take_an_engines_own_timeout(monkeypatch):
    monkeypatch.setattr(engine_set, "END_SECONDS", 0.01)
    checked = []

    def check(operation):
        time.sleep(0.5)  # longer than the wait for an engine after another one's failure
        checked.append(operation)

    backends_of(check).check("update_weights")
    assert checked == ["update_weights"]


def test_an_error_names_all_engines_that_failed():
    both = threading.Barrier(2)

    def raising(error):
        def check(operation):
            both.wait(30)
            raise error

        return check

    backend = backends_of(raising(ValueError("a")), raising(EngineError("b")))
    with pytest.raises(EngineError) as caught:
        backend.check("update_weights")
    assert "engine 1 of 2: a" in str(caught.value) and "engine 2 of 2: b" in str(caught.value)
