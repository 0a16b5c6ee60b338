"""Tests updates from several ranks' shareable regions, which the engine maps."""

REGIONS = """
import memsaver
from weight_regions import cycle, shareable
from memsaver._memory.sharing.sending import kept
from memsaver.errors import SharingError
from watched_children import wait_until
memsaver.configure(importer_seconds=10)
"""


def test_every_rank_sends_its_own_tensors(run_ranks):
    run_ranks(2, REGIONS)("""
engine, backend = engine_of(2)
weights = shareable("trainer", checkpoint(2))
report = update(engine, weights, verify="full")
assert holds(backend, checkpoint(2)) and report.mapped == report.held == 13, report
cycle("trainer")
# Shards in the engine's layout.
like = weight_engine.Model(engine.layout.tp_rank, 2)
like.load_weights(checkpoint(3).items())
shards = shareable("trainer", dict(like.named_parameters()))
report = update(engine, shards, layout="engine", verify="full")
assert holds(backend, checkpoint(3)) and report.mapped == report.held == 9, report
cycle("trainer")
# Whole tensors of a distributed model; its shards are gathered into buckets.
mesh = init_device_mesh("cpu", (2,))
weights = checkpoint(4)
state = sharded(weights, mesh, lambda name, tensor: [Shard(0)])
for name, tensor in shareable("trainer", weights).items():
    if ".norm." in name or ".k." in name:
        state[name] = DTensor.from_local(tensor, mesh, [Replicate()])
report = update(engine, state, verify="full")
assert holds(backend, weights) and report.mapped == 4 and report.held == 13, report
cycle("trainer")
""")


def test_a_tensor_is_mapped_only_if_all_ranks_can_send_it_in_place(run_ranks):
    run_ranks(2, REGIONS)("""
weights = shareable("trainer", checkpoint(2))
if RANK == 1:
    name = "layers.0.q.weight"
    weights[name] = weights[name].clone()
for tp in (2, 1):  # one engine, and an engine for each rank
    engine, backend = engine_of(tp)
    report = update(engine, weights, verify="full")
    assert holds(backend, checkpoint(2)) and (report.mapped, report.buckets) == (12, 1), report
    cycle("trainer")
if backend is not None and RANK == 1:
    backend.domain = "elsewhere"
report = update(engine, weights, verify="full")
assert holds(backend, checkpoint(2)) and report.mapped == 0, report

# One engine on several machines, of which only the leader's is known to be the engine's.
engine, backend = engine_of(2)
if RANK == 1:
    patch.setattr("memsaver.integrations.rollout.weights.plan.domain", lambda: "elsewhere")
report = update(engine, weights, verify="full")
assert holds(backend, checkpoint(2)) and (report.mapped, report.held) == (0, 13), report
""")


def test_a_failure_of_one_rank_is_raised_on_all(run_ranks):
    run_ranks(2, REGIONS)("""
engine, backend = engine_of(2)
weights = shareable("trainer", checkpoint(2))

def is_untouched():
    return backend is None or all(p.isnan().all() for m in backend.models for p in m.parameters())

if RANK == 1:
    memsaver.pause("trainer")
error = refused(InvalidStateError, update, engine, weights)
assert error.tag == "trainer" and (backend is None or backend.calls == [])
if RANK == 1:
    memsaver.resume("trainer")

# The state_dict of one rank waits as long as the engine's timeout; the others wait for its report.
import contextlib
from looks import held
from simulated_driver import Simulator
from memsaver.integrations.trainer import offload
impatient, _ = engine_of(2)
impatient.timeout = 1  # not that of its constructor, which is a collective call, too
with contextlib.ExitStack() as late:
    state = weights
    if RANK == 1:
        state = torch.nn.Linear(4, 4)
        handle = offload(state, tag="late")
        handle.pause()
        late.enter_context(held(Simulator()))
        handle.resume(wait=False)
    error = refused(InvalidStateError, update, impatient, state, timeout=30)
    assert error.tag == "late" and "may take 1 s" in str(error), error

# Another thread has it for longer than the update waits.
from concurrent.futures import ThreadPoolExecutor
from memsaver._runtime.native import _C
reservation = _C.Reservation(["trainer"] if RANK == 1 else [])
with ThreadPoolExecutor(1) as other:
    other.submit(reservation.take).result()
    error = refused(InvalidStateError, update, engine, weights, timeout=0.5)
    assert "longer than 0.5 s" in str(error) and (backend is None or backend.calls == []), error
    other.submit(reservation.release).result()

# It is paused in the middle: no rank's tensors are sent.
from memsaver.integrations.rollout.weights import regions
mapped = regions.mapped

def pausing(*named):
    if RANK == 1:
        memsaver.pause("trainer")
    return mapped(*named)

for verify in ("off", "sampled", "full"):
    patch.setattr(regions, "mapped", pausing)
    error = refused(SharingError, update, engine, weights, verify=verify)
    assert error.tag == "trainer" and is_untouched() and kept() == 0
    assert backend is None or backend.calls == ["begin", "end"]
    patch.setattr(regions, "mapped", mapped)
    if RANK == 1:
        memsaver.resume("trainer")
    if backend is not None:
        backend.calls.clear()
report = update(engine, weights, verify="full")
assert holds(backend, checkpoint(2)) and report.mapped == 13
# Ranks whose contents differ send nothing.
if RANK == 1:
    weights["layers.0.k.weight"][0, 0] += 1
error = refused(WeightMismatchError, update, engine, weights, verify="full")
assert error.tensors == ("layers.0.k.weight",) and "on rank 1" in str(error), error
wait_until(lambda: kept() == 0)  # the update before it is released in the background
cycle("trainer")
""")
