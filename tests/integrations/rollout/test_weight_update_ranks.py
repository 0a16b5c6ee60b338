"""Tests `update` on several ranks: sharded trainers, several engines, and failures on one rank."""

import pytest


def test_shards_of_many_kinds_on_two_ranks(run_ranks):
    run_ranks(2)("""
import itertools
from wrapped_tensors import Wrapped
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
def float8(shards):  # as in torchao's float8 training under FSDP2
    made = {n: t if t.dim() < 2 else DTensor.from_local(
        Wrapped(t.to_local()), mesh, t.placements, shape=t.shape, stride=t.stride()
    ) for n, t in shards.items()}
    made["lm_head.weight"] = made["embed.weight"]
    return made
for seed, (kind, wrap) in enumerate(itertools.product(kinds, (dict, float8)), 3):
    weights = checkpoint(seed)
    shards = wrap(sharded(weights, mesh, kind))
    report = update(engine, shards, verify="full", bucket_bytes=700)
    assert holds(backend, weights), seed
    assert report.held == 13 and report.tied == ("lm_head.weight",), report
    assert intact(shards, weights)
# The engine's own layout: each rank sends its own part.
like = weight_engine.Model(engine.layout.tp_rank, 2)
like.load_weights(checkpoint(9).items())
report = update(engine, like, layout="engine", verify="full", bucket_bytes=256)
assert holds(backend, checkpoint(9)) and report.held == report.tensors
""")


def test_replicas_that_differ_between_ranks_are_found(run_ranks):
    run_ranks(2)("""
weights = checkpoint(2)
name = "layers.0.k.weight"
if RANK == 1:
    weights[name].view(-1).view(torch.uint8)[79] ^= 4
engine, backend = engine_of(2)
error = refused(WeightMismatchError, update, engine, weights, verify="full", bucket_bytes=700)
assert error.tensors == (name,) and "on rank 1" in str(error), error
assert backend is None or backend.calls[-1] == "end"
update(engine, weights, verify="off")  # nothing is compared
# In the engine's own layout each rank has different contents.
like = weight_engine.Model(engine.layout.tp_rank, 2)
like.load_weights(checkpoint(9).items())
update(engine, like, layout="engine", verify="full")
assert holds(backend, checkpoint(9))
# The ranks of each engine have equal contents, but the engines differ.
alone, backend = engine_of(1)
for options in ({}, {"layout": "engine"}):
    state = weights
    if options:
        state = weight_engine.Model()
        state.load_weights(weights.items())
    error = refused(WeightMismatchError, update, alone, state, verify="full", **options)
    assert "on engine 1" in str(error), error
    assert error.tensors == (("qkv_0",) if options else (name,)), error.tensors
report = update(alone, checkpoint(3), verify="full")
assert holds(backend, checkpoint(3)) and report.held == 13
""")


@pytest.mark.parametrize("tp", [1, 2])
def test_tensors_that_are_tied_on_one_rank_only_are_sent(tp, run_ranks):
    run_ranks(2, f"TP = {tp}")("""
class Untied(weight_engine.Model):
    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.register_parameter("head", weight_engine.parameter(14, 8, dtype=torch.float32))
    def copies(self, name, tensor):
        if name == "lm_head.weight":
            return [(self.head.data, tensor)]
        return super().copies(name, tensor)
engine, backend = engine_of(TP)
if backend is not None:
    backend.models = [Untied(rank, TP) for rank in range(TP)]
    backend.ranks = [Manager(model) for model in backend.models]
weights = checkpoint(5)
if RANK == 1:
    weights["lm_head.weight"] = weights["embed.weight"].clone()
report = update(engine, weights, verify="full")
assert report.tied == () and report.held == report.tensors == 14, report
for model in backend.models if backend is not None else ():
    assert torch.equal(model.head, weights["lm_head.weight"])
# If the contents there differ too, no tensor counts as held.
if RANK == 1:
    weights["lm_head.weight"] += 1
error = refused(WeightMismatchError, update, engine, weights, verify="full")
assert error.tensors == ("lm_head.weight",), error
# A rank without an element of the tensors leaves the decision to the others.
one = distribute_tensor(torch.ones(1), init_device_mesh("cpu", (2,)), [Shard(0)])
report = update(engine, {"layers.0.scale": one, "layers.1.scale": one}, verify="full")
assert report.tied == ("layers.1.scale",), report
""")


def test_fsdp2_is_gathered_a_bucket_at_a_time(run_ranks):
    run_ranks(2)("""
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
""")


def test_a_failure_on_one_of_two_ranks_is_raised_on_both(run_ranks):
    run_ranks(2)("""
from memsaver.integrations.rollout.weights import updates
engine, backend = engine_of(2)
weights = checkpoint(1)

# Ranks whose weights differ are rejected before any call of the engine.
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
assert "rank 1" in str(error) and "must be a tensor" in str(error), error

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
assert "generation is still paused" in str(error)
assert backend is None or (backend.calls[-1] == "end" and backend.calls.count("load") > 0)
report = update(engine, weights, pause="abort", verify="full")
assert holds(backend, weights) and (backend is None or backend.calls[-1] == "continue")

# Engines that fail: the cause, on both ranks.
if backend is not None:
    patch.setattr(backend, "load_weights", lambda *a, **k: (_ for _ in ()).throw(
        EngineError("the engine died")))
error = refused(EngineError, update, engine, weights)
assert "rank 0" in str(error) and "the engine died" in str(error), error
if backend is not None:
    del backend.load_weights
update(engine, weights)

# A wrong element in one rank of the engine.
def change(model):
    model.o_t_0.data[0, 0] += model.rank == 1
with corrupted(change):
    error = refused(WeightMismatchError, update, engine, weights, verify="full")
assert error.tensors == ("layers.0.o.weight",), error.tensors
assert "on rank 0 (" in str(error), error  # of the fake's ranks, which are one each

# A rank that comes no more.
patch.setattr("memsaver.integrations.rollout.weights.plan.GRACE_SECONDS", 0)
engine, backend = engine_of(2, timeout=3)
start = time.monotonic()
store = dist.distributed_c10d._get_default_store()
if RANK == 0:
    error = refusals.refused(GroupError, update, engine, weights)
    assert error.missing == (1,) and time.monotonic() - start < 30, error
    store.set("missed", "")
else:
    store.wait(["missed"], datetime.timedelta(seconds=60))
assert intact(weights, checkpoint(1))
""")


@pytest.mark.parametrize("tp", [1, 2])
def test_arguments_that_differ_between_ranks_are_an_error_on_all(tp, run_ranks):
    run_ranks(2, f"TP = {tp}")("""
engine, backend = engine_of(TP)
weights = checkpoint(1)
class Group(WeightGroup):
    def __init__(self):
        self.joined, self._broken, self._backend, self.name = True, "", "gloo", "g"
        self._engine = engine
cases = [
    ("verify", "sampled", "full"), ("verify", "full", "sampled"), ("verify", "off", "full"),
    ("layout", "whole", "engine"), ("layout", "engine", "whole"),
    ("version", None, "2"), ("version", "\\n", "2"), ("bucket_bytes", 700, 701),
    ("pause", None, "abort"), ("pause", "abort", "retract"), ("flush_cache", None, False),
    ("group", None, Group()),
]
for name, *values in cases:
    options = {name: values[RANK]}
    error = refused(ConfigError, RolloutEngine.update_weights, engine, weights, **options)
    for rank, value in enumerate(values):
        shown = "a WeightGroup" if isinstance(value, Group) else repr(value)
        assert f"{shown} on rank {rank}" in str(error), error
    assert f"{name} must be equal on all ranks" in str(error), error
if TP == 2:
    for options, text in (
        ([{"backend": "gloo"}, {"backend": "nccl"}], "'gloo' on rank 0, 'nccl' on rank 1"),
        ([{}, {"address": "x" + chr(0xD800)}], repr("x" + chr(0xD800))),
        ([{}, {"port": -1}], "-1"),
    ):
        error = refused(ConfigError, lambda one, **named: WeightGroup(one, **named), engine,
                        **options[RANK])
        assert text in str(error), error
# An unknown option of one rank, or of both.
for options in ([{"nope": 1}, {}], [{}, {"verfy": "off"}], [{"nope": 1}, {"none": 2}]):
    error = refused(ConfigError, RolloutEngine.update_weights, engine, weights, **options[RANK])
    for name in (*options[0], *options[1]):
        assert repr(name) in str(error), error
assert backend is None or backend.calls == []
# Names that cannot be sent, and versions.
odd = "x" + chr(0xD800)
for state, options in (
    ({**weights, odd: torch.ones(2)}, {"verify": "off"}),
    ({**weights, odd: torch.ones(2)}, {"verify": "full"} if RANK else {}),
    (weights, {"version": odd}),
):
    error = refused(ConfigError, RolloutEngine.update_weights, engine, state, **options)
    assert repr(odd) in str(error), error
assert backend is None or backend.calls == []
# The ranks still make the same calls.
for seed in (2, 3):
    report = engine.update_weights(checkpoint(seed), verify="full", version=str(seed))
    assert holds(backend, checkpoint(seed)) and report.version == str(seed)
""")


def test_two_engines_of_two_ranks(run_ranks):
    """A trainer is sharded over all ranks; if one engine fails, both engines' updates fail."""
    run_ranks(4)("""
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
    report = update(engine, shards, verify="full", bucket_bytes=1500)
    assert holds(backend, weights) and report.held == 13, seed
    assert len(set(gathered((report.held, report.buckets)))) == 1

# Only the second engine's loads go wrong.
def change(model):
    model.norm_0.data[0] += RANK == 2
with corrupted(change):
    error = refused(WeightMismatchError, update, engine, shards, verify="full", bucket_bytes=1500)
assert error.tensors == ("layers.0.norm.weight",), error.tensors
update(engine, shards, verify="full", bucket_bytes=1500)
assert holds(backend, weights)

# Only the second engine does not begin: with the first one the update ends, too.
if RANK == 2:
    backend.begin_update = lambda timeout: (_ for _ in ()).throw(EngineError("not now"))
error = refused(EngineError, update, engine, shards)
assert "rank 2 of 4" in str(error) and "not now" in str(error), error
assert backend is None or backend.calls[-1] == "end"

# Only the first engine lacks the plugin, and reports checksums; the second one compares itself.
mixed, one = engine_of(2)
if RANK == 0:
    one.ranks = [weight_engine.SchedulerWeightUpdaterManager(m) for m in one.models]
for _ in range(2):
    report = update(mixed, shards)
    assert holds(one, weights) and len(report.checksums) == (2 if RANK < 2 else 0), report
    assert bool(report.unverified) == (RANK < 2) and bool(report.held) == (RANK >= 2), report

# Engines without the plugin report the tensors that they hold, and the reports must be equal.
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
assert "have different checksums" in str(error), error

# Engines that are sent different things.
mine = {**weights, **({"extra": torch.ones(1)} if RANK >= 2 else {})}
error = refused(ConfigError, update, engine, mine)
assert "different engines do not send the same" in str(error), error
""")


def test_an_engine_with_replicas_that_each_share_a_gpu_with_a_rank(run_ranks):
    """Each replica receives its own rank's payload, and a failure of one replica fails both
    updates.
    """
    run_ranks(2)("""
engine, backend = engine_of(2, replicas=2, timeout=30)
for seed in (1, 2):
    report = update(engine, checkpoint(seed), verify="full", bucket_bytes=1500)
    assert report.held == report.received == 13 and report.buckets > 3, report
    assert holds(backend, checkpoint(seed))
if backend is not None:
    assert len(set(backend.requests[-1].serialized_named_tensors)) == 2
# One replica's memory changes after its load.
def change(model):
    model.norm_0.data[0] += backend is not None and model is backend.models[1]
with corrupted(change):
    error = refused(WeightMismatchError, update, engine, checkpoint(3), verify="full")
assert error.tensors == ("layers.0.norm.weight",) and "rank 1 (" in str(error), error
update(engine, checkpoint(3), verify="full")
assert holds(backend, checkpoint(3))
# Shards in the engine's layout: each replica has all of the parameters.
named = dict(weight_engine.Model().named_parameters())
for tensor in named.values():
    tensor.data.fill_(RANK + 1.0)
report = update(engine, named, layout="engine", verify="full")
assert report.held == len(named)
if backend is not None:
    assert [float(one.norm_1[0]) for one in backend.models] == [1.0, 2.0]
""")
