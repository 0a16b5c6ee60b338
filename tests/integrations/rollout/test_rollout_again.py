"""Tests that torch.distributed can be shut down and initialized again after an engine was used."""

import rank_processes

CODE = """
import datetime, os, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from process_sockets import eventually, listening
from refusals import raises
from weight_engine import Backend, checkpoint
from memsaver.errors import InvalidStateError
from memsaver.integrations.rollout.rollout_engine import RolloutEngine
from memsaver.integrations.rollout.ranks import layout_of
from memsaver.integrations.rollout.session import ColocatedSession
from memsaver.integrations.rollout.weights import update

RANK = int(os.environ["RANK"])
torch.multiprocessing.set_sharing_strategy("file_system")
engines = []  # closed, and kept

def met(what):
    # Uses files, because torch's store of the next group must not be reached before the last ends.
    Path(f"{what}-{RANK}").touch()
    eventually(lambda: Path(f"{what}-{1 - RANK}").exists(), True)

for number, shape in enumerate([(1, 2), (2, 1), (1, 2)]):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    layout = layout_of(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")))
    backend = Backend(size=shape[1]) if layout.is_leader else None
    engine = RolloutEngine(backend, layout, timeout=20)
    del layout
    update(engine, checkpoint())
    assert engine.together.gather("a call", lambda: RANK) == ([0, 1] if shape[1] == 2 else [RANK])
    group = dist.new_group([0, 1])
    session = ColocatedSession(engine, torch.nn.Linear(2, 2), group=group, sleep=False, timeout=20)
    del group
    dist.barrier()
    session.close()
    engine.close()
    engine.close()
    start = time.monotonic()
    assert "closed" in raises(InvalidStateError, engine.pause_generation)  # waits for no rank
    assert time.monotonic() - start < 10 and "closed" in repr(engine)
    engines += [engine, session]
    dist.destroy_process_group()
    eventually(listening, [])
    met(f"ended-{number}")
"""


def test_a_closed_engine_keeps_nothing_of_a_process_group(tmp_path):
    rank_processes.run(CODE, 2, tmp_path, timeout=110)
