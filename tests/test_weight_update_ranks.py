"""`update` on several ranks: sharded trainers, several engines, and what fails on one of them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import rank_processes

# What every rank starts with: an engine of `tp` ranks for each group of so many, CPU tensors.
PRELUDE = """
import datetime, os, time  # noqa: E402
import pytest, torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
import weight_engine  # noqa: E402
from weight_engine import Backend, checkpoint  # noqa: E402
from memsaver.distributed import GroupError, RankError  # noqa: E402
from memsaver.errors import ConfigError, InvalidStateError  # noqa: E402
from memsaver.integrations.rollout import WeightMismatchError  # noqa: E402
from memsaver.integrations.rollout.engine import RolloutEngine  # noqa: E402
from memsaver.integrations.rollout.ranks import layout_of  # noqa: E402
from memsaver.integrations.rollout.weights import WeightGroup, update  # noqa: E402
from memsaver.integrations.sglang.errors import EngineError  # noqa: E402

torch.multiprocessing.set_sharing_strategy("file_system")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
patch = pytest.MonkeyPatch()
hooked = weight_engine.hooked(patch)
Manager = hooked.__enter__()

def engine_of(tp, timeout=20, **model):
    mesh = init_device_mesh("cpu", (SIZE // tp, tp), mesh_dim_names=("dp", "tp"))
    layout = layout_of(mesh)
    backend = Backend(Manager, tp, **model) if layout.is_leader else None
    return RolloutEngine(backend, layout, timeout=timeout), backend

def gathered(value):
    rows = [None] * SIZE
    dist.all_gather_object(rows, value)
    return rows

def holds(backend, weights=None):
    return backend is None or all(m.holds(weights or checkpoint()) for m in backend.models)

def refused(kind, call, *args, **named):
    # The error, whose text must be the same on all ranks of an engine.
    try:
        call(*args, **named)
    except kind as error:
        return error
    raise AssertionError("nothing was refused")

def sharded(weights, mesh, placements):
    made = {n: distribute_tensor(t, mesh, placements(n, t)) for n, t in weights.items()}
    made["lm_head.weight"] = made["embed.weight"]
    return made

def intact(weights, like):
    return all(
        torch.equal(t.full_tensor() if isinstance(t, DTensor) else t, like[n])
        for n, t in weights.items()
    )
"""
END = """
dist.barrier()
dist.destroy_process_group()
print("fine")
"""


def run(code: str, size: int, tmp_path, **options) -> None:
    said = rank_processes.run(PRELUDE + code + END, size, tmp_path, timeout=150, **options)
    assert all("fine" in text for text in said)


@pytest.mark.timeout(200)
def test_shards_of_many_kinds_on_two_ranks(tmp_path):
    run(
        """
weights = checkpoint(2)
mesh = init_device_mesh("cpu", (2,))
engine, backend = engine_of(2)
for verify, bucket_bytes in (("full", 700), ("sampled", 1 << 20)):
    # Whole tensors on every rank, as of a data-parallel trainer.
    report = update(engine, weights, verify=verify, bucket_bytes=bucket_bytes)
    assert holds(backend, weights) and report.tensors == 13
    assert len(set(gathered((report.held, report.received, report.buckets, report.tied)))) == 1

weights = checkpoint(3)
kinds = [
    lambda name, tensor: [Shard(0)],  # in place where it is even, and scale is not
    lambda name, tensor: [Shard(tensor.dim() - 1)],
    lambda name, tensor: [Replicate()],
]
for seed, kind in enumerate(kinds, 3):
    weights = checkpoint(seed)
    shards = sharded(weights, mesh, kind)
    report = update(engine, shards, verify="full", bucket_bytes=700)
    assert holds(backend, weights), seed
    assert report.held == 13 and report.tied == ("lm_head.weight",), report
    assert intact(shards, weights)
# The engine's own layout: each rank sends its own part.
like = weight_engine.Model(engine.layout.tp_rank, 2)
like.load_weights(checkpoint(9).items())
report = update(engine, like, layout="engine", verify="full", bucket_bytes=256)
assert holds(backend, checkpoint(9)) and report.held == report.tensors
""",
        2,
        tmp_path,
    )


@pytest.mark.timeout(200)
def test_fsdp2_is_gathered_a_bucket_at_a_time(tmp_path):
    run(
        """
from torch.distributed.fsdp import fully_shard
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for part in "qkvo":
            setattr(self, part, torch.nn.Linear(8, 8, bias=False))
        self.norm = torch.nn.LayerNorm(8, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
    def forward(self, x):
        return self.norm(self.o(self.q(x) + self.k(x) + self.v(x))) * self.scale
class Trainer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(14, 8)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.lm_head = torch.nn.Linear(8, 14, bias=False)
        self.lm_head.weight = self.embed.weight
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)
mesh = init_device_mesh("cpu", (2,))
trainer = Trainer()
trainer.load_state_dict(checkpoint(1))
for layer in trainer.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(trainer, mesh=mesh)
optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
engine, backend = engine_of(2)
for step in range(2):
    trainer(torch.arange(14)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    report = update(engine, trainer, version=str(step), verify="full", bucket_bytes=512)
    whole = {name: t.full_tensor() for name, t in trainer.state_dict().items()}
    assert holds(backend, whole) and report.held == 13
    assert report.bucket_bytes <= 512 and report.buckets > 6, report
    assert backend is None or backend.version == str(step)
""",
        2,
        tmp_path,
    )


@pytest.mark.timeout(200)
def test_what_fails_on_two_ranks_fails_on_both(tmp_path):
    run(
        """
from memsaver.integrations.rollout.weights import updates
from memsaver.integrations.sglang import weight_loads
engine, backend = engine_of(2)
weights = checkpoint(1)

# Ranks that do not send the same, before the engine is asked for anything.
other = dict(weights)
if RANK == 1:
    other["layers.1.norm.weight"] = torch.ones(9)
error = refused(ConfigError, update, engine, other)
assert "rank 0 has layers.1.norm.weight (float32, (8,))" in str(error), error
assert "rank 1 has layers.1.norm.weight (float32, (9,))" in str(error), error
other = {n: t for n, t in weights.items() if RANK == 0 or n != "layers.1.scale"}
assert "and rank 1 has lm_head.weight" in str(refused(ConfigError, update, engine, other))
assert backend is None or backend.calls == []

# A state that one rank cannot send.
other = {**weights, "layers.0.scale": 1 if RANK == 1 else weights["layers.0.scale"]}
error = refused(ConfigError, update, engine, other)
assert "rank 1" in str(error) and "no tensor" in str(error), error

# A rank that fails as it fills its bucket.
class Failing(updates.BucketMemory):
    def write(self, bucket, sources):
        if RANK == 1 and "layers.1.q.weight" in bucket.names:
            raise MemoryError("rank 1 has no room")
        return super().write(bucket, sources)
with pytest.MonkeyPatch.context() as inner:
    inner.setattr(updates, "BucketMemory", Failing)
    error = refused(RankError, update, engine, weights, bucket_bytes=700, pause="abort")
assert set(error.failures) == {1} and "rank 1 has no room" in str(error), error
assert "generation is paused still" in str(error)
assert backend is None or (backend.calls[-1] == "end" and backend.calls.count("load") > 0)
report = update(engine, weights, pause="abort", verify="full")
assert holds(backend, weights) and (backend is None or backend.calls[-1] == "continue")

# Engines that fail: the cause, on both ranks.
if backend is not None:
    patch.setattr(backend, "load_tensors", lambda *a, **k: (_ for _ in ()).throw(
        EngineError("the engine died")))
error = refused(EngineError, update, engine, weights)
assert "rank 0" in str(error) and "the engine died" in str(error), error
if backend is not None:
    del backend.load_tensors
update(engine, weights)

# A wrong element in one rank of the engine.
def corrupting(model, named, load, loads=weight_loads.watched):
    result = loads(model, named, load)
    if model.rank == 1:
        model.o_t_0.data[0, 0] += 1
    return result
with pytest.MonkeyPatch.context() as inner:
    inner.setattr(weight_loads, "watched", corrupting)
    error = refused(WeightMismatchError, update, engine, weights, verify="full")
assert error.tensors == ("layers.0.o.weight",), error.tensors
assert "on rank 0 (" in str(error), error  # of the stand-in's ranks, which are one each

# A rank that comes no more.
start = time.monotonic()
engine.together._timeout = 5
if RANK == 0:
    error = refused(GroupError, update, engine, weights)
    assert error.missing == (1,) and time.monotonic() - start < 30, error
else:
    time.sleep(12)
assert intact(weights, checkpoint(1))
""",
        2,
        tmp_path,
    )


@pytest.mark.timeout(200)
def test_two_engines_of_two_ranks(tmp_path):
    """A trainer that is sharded over all of them; what fails with one engine ends both updates."""
    run(
        """
from memsaver.integrations.sglang import weight_loads
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
flat = init_device_mesh("cpu", (4,))
engine, backend = engine_of(2)
cases = [
    (flat, lambda n, t: [Shard(0)]),
    (mesh, lambda n, t: [Replicate(), Shard(0)]),
    (mesh, lambda n, t: [Shard(0), Shard(t.dim() - 1)]),
]
for seed, (over, kind) in enumerate(cases, 1):
    weights = checkpoint(seed)
    shards = sharded(weights, over, kind)
    report = update(engine, shards, verify="full", bucket_bytes=700)
    assert holds(backend, weights) and report.held == 13, seed
    assert len(set(gathered((report.held, report.buckets)))) == 1

# Only the second engine's loads go wrong.
def corrupting(model, named, load, loads=weight_loads.watched):
    result = loads(model, named, load)
    if RANK == 2:
        model.norm_0.data[0] += 1
    return result
with pytest.MonkeyPatch.context() as inner:
    inner.setattr(weight_loads, "watched", corrupting)
    error = refused(WeightMismatchError, update, engine, shards, verify="full", bucket_bytes=700)
assert error.tensors == ("layers.0.norm.weight",), error.tensors
update(engine, shards, verify="full", bucket_bytes=700)
assert holds(backend, weights)

# Engines without the plugin: they say what they hold, and must say the same.
hooked.__exit__(None, None, None)
patch.undo()
plain, other = engine_of(2)
if other is not None:
    other.ranks = [weight_engine.SchedulerWeightUpdaterManager(m) for m in other.models]
report = update(plain, shards)
assert report.held == 0 and len(report.checksums) == 2 and holds(other, weights), report
if RANK == 2:
    other.checksums = lambda timeout: ["?", "!"]
error = refused(WeightMismatchError, update, plain, shards)
assert "hold different ones" in str(error), error

# Engines that are sent different things.
mine = {**weights, **({"extra": torch.ones(1)} if RANK >= 2 else {})}
error = refused(ConfigError, update, engine, mine)
assert "different engines do not send the same" in str(error), error
""",
        4,
        tmp_path,
    )


@pytest.mark.timeout(200)
def test_a_group_with_an_engine_elsewhere(tmp_path):
    """Ranks 0 and 1 are a trainer; 2 and 3 the ranks of its engine, which does as SGLang does."""
    run(
        """
import threading
from torch.distributed.distributed_c10d import (
    Backend as Kind, PrefixStore, _new_process_group_helper, _world, default_pg_timeout, rendezvous)
own = dist.new_group([0, 1])
ranks = dist.new_group([2, 3])
store = dist.distributed_c10d._get_default_store()

def joined(address, port, rank, size, name, kind):
    # As SGLang's init_custom_process_group.
    made, rank, size = next(rendezvous(f"tcp://{address}:{port}", rank, size,
                                       timeout=default_pg_timeout))
    made.set_timeout(default_pg_timeout)
    group, _ = _new_process_group_helper(
        size, rank, [], Kind(kind), PrefixStore(name, made), group_name=name,
        timeout=default_pg_timeout)
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group

if RANK >= 2:
    model = weight_engine.Model(RANK - 2, 2)
    manager = Manager(model, ranks)
    groups = {}
    class Receiving(type(manager)):
        pass
    number = 0
    while True:
        number += 1
        todo = eval(store.get(f"todo{number}").decode())
        if todo[0] == "end":
            break
        if todo[0] == "join":
            _, address, port, offset, size, name, kind = todo
            groups[name] = joined(address, port, offset + RANK - 2, size, name, kind)
            answer = (True, "joined")
        elif todo[0] == "leave":
            dist.destroy_process_group(groups.pop(todo[1]))
            answer = (True, "left")
        elif todo[0] == "load":
            _, names, dtypes, shapes, name, text = todo
            tensors = [torch.empty(s, dtype=getattr(torch, d)) for s, d in zip(shapes, dtypes)]
            for tensor in tensors:
                dist.broadcast(tensor, 0, group=groups[name])
            request = weight_engine.Request(text, tensors=list(zip(names, tensors)))
            output = manager.update_weights_from_distributed(request)
            answer = (output.success, output.message)
        else:
            answer = (model.holds(checkpoint(todo[1])), "")
        if RANK == 2:
            store.set(f"done{number}", repr(answer))
else:
    class Remote(Backend):
        def __init__(self):
            super().__init__(Manager, 0)
            self.tp_size, self.number, self.refuses = 2, 0, False
        def ask(self, *todo):
            self.number += 1
            store.set(f"todo{self.number}", repr(todo))
            return eval(store.get(f"done{self.number}").decode())
        def join_group(self, address, port, *, rank_offset, world_size, group_name, backend,
                       timeout):
            self.ask("join", address, port, rank_offset, world_size, group_name, backend)
        def leave_group(self, group_name, timeout):
            self.ask("leave", group_name)
        def load_broadcast(self, names, dtypes, shapes, *, group_name, load_format, flush_cache,
                           weight_version, order=None, timeout):
            if self.refuses:
                raise EngineError("the engine refused")
            self.calls.append("load")
            done, message = self.ask(
                "load", list(names), list(dtypes), [tuple(s) for s in shapes], group_name,
                order.text())
            from memsaver.integrations.sglang.weight_checks import checks_of
            return checks_of(done, message)
    from memsaver.integrations.rollout.ranks import Layout
    layout = Layout(rank=RANK, tp_group=own, tp_ranks=(0, 1), tp_rank=RANK)
    backend = Remote() if RANK == 0 else None
    engine = RolloutEngine(backend, layout, timeout=20)
    mesh = dist.device_mesh.DeviceMesh.from_group(own, "cpu")
    with WeightGroup(engine, backend="gloo", timeout=20) as group:
        for seed in (1, 2):
            shards = sharded(checkpoint(seed), mesh, lambda n, t: [Shard(0)])
            report = update(engine, shards, group=group, pause="retract", verify="full",
                            bucket_bytes=700, version=str(seed))
            assert report.held == report.received == 13 and report.buckets > 3
            assert backend is None or backend.ask("holds", seed)[0]
            assert backend is None or backend.calls[-1] == "continue"
        error = refused(ConfigError, update, engine, shards, group=group, layout="engine")
        assert "whole tensors by a group" in str(error)
        # What the engine refuses is told on both, and the group is of no more use.
        if backend is not None:
            backend.refuses = True
        error = refused(EngineError, update, engine, shards, group=group)
        assert "the engine refused" in str(error)
        error = refused(InvalidStateError, update, engine, shards, group=group)
        assert "the group broke" in str(error) and "make a new one" in str(error), error
        if backend is not None:
            backend.refuses = False
    assert "was left" in str(refused(InvalidStateError, update, engine, shards, group=group))
    if backend is not None:
        store.set(f"todo{backend.number + 1}", repr(("end",)))
""",
        4,
        tmp_path,
    )
