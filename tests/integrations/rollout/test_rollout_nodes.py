"""Tests engines that have a part on each of several hosts, and failures on all ranks."""


def test_the_first_rank_of_each_host_starts_a_part_of_the_engine(run_ranks):
    run_ranks(4)("""
from memsaver.integrations.engine.interface import Sample
from memsaver.integrations.rollout import Restarts
from memsaver.integrations.engine import placement
from memsaver.integrations.engine.placement import Gpu
from memsaver.integrations.sglang import launch as launching

class Echo(Backend):
    def generate(self, requests, timeout):
        return [Sample([one.input_ids[0] + 1], None, "stop", None) for one in requests]

calls, failures = [], []

def launch(place, size, arguments, timeout, variables):
    calls.append(("first", size, {**place.arguments, **variables}))
    return Echo(Manager, size)

def launch_node(place, size, arguments, timeout, variables):
    calls.append(("node", size, {**place.arguments, **variables}))
    if failures:
        raise EngineError("no memory")
    return lambda: calls.append("end")

launching.launch, launching.launch_node = launch, launch_node
placement.gpu_of_this_process = lambda: Gpu(f"host{RANK // 2}", None, RANK % 2)
mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
try:
    RolloutEngine.launch(mesh, timeout=20, asleep="sleep" if RANK == 1 else "wait")
except ConfigError as error:
    assert "rank 1" in str(error) and "asleep='sleep'" in str(error), error
else:
    raise AssertionError("an unknown policy was accepted")
for size in (4, 2):
    calls.clear()
    engine = RolloutEngine.launch(mesh, timeout=20, tp_size=size, asleep="wait" if RANK else "wake")
    assert engine.tp_size == size
    assert [call[:2] for call in calls] == {
        0: [("first", size)], 2: [("node", size)] if size == 4 else []
    }.get(RANK, []), calls
    if calls and size == 4:
        assert calls[0][2]["nnodes"] == 2 and calls[0][2]["node_rank"] == RANK // 2
        assert calls[0][2]["dist_init_addr"].startswith("host0:")
    assert all(call[2]["MEMSAVER_SGLANG_ASLEEP"] == "wake" for call in calls)  # the leader's
    addresses = {one for one in gathered(calls and calls[0][2].get("dist_init_addr")) if one}
    assert len(addresses) == (size == 4), addresses
    assert engine.generate([[RANK]]).token_ids.tolist() == [[RANK + 1]]
    update(engine, checkpoint(3), verify="full")
    assert holds(engine.backend, checkpoint(3))
    engine.close()
    engine.close()
    assert (calls[-1:] == ["end"]) == (RANK == 2 and size == 4), calls
# A part that does not start is an error on all ranks, and the others end.
if RANK == 2:
    failures.append(1)
text = refusals.raises(EngineError, RolloutEngine.launch, mesh, timeout=20)
assert "rank 2" in text and "no memory" in text, text
# Such an engine cannot be restarted.
text = refusals.raises(ConfigError, RolloutEngine.launch, mesh, timeout=20, restarts=Restarts())
assert "several hosts" in text, text
""")
