"""Code that runs as the ranks of a trainer with a fake engine, on the CPU."""

# Common code of the ranks: an engine for each group of `tp` ranks, and CPU tensors.
PRELUDE = """
import contextlib, datetime, os, time
import pytest, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
import refusals, weight_engine
from rank_calls import gathered
from weight_engine import Backend, checkpoint
from memsaver.distributed import GroupError, RankError
from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.rollout import WeightMismatchError
from memsaver.integrations.rollout.rollout_engine import RolloutEngine
from memsaver.integrations.rollout.ranks import layout_of
from memsaver.integrations.rollout.weights import WeightGroup, update
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.weights import load_check

torch.multiprocessing.set_sharing_strategy("file_system")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
patch = pytest.MonkeyPatch()
hooked = weight_engine.hooked(patch)
Manager = hooked.__enter__()

def engine_of(tp, timeout=20, **model):
    mesh = init_device_mesh("cpu", (SIZE // tp, tp), mesh_dim_names=("dp", "tp"))
    layout = layout_of(mesh)
    size = tp // model.get("replicas", 1)
    backend = Backend(Manager, size, **model) if layout.is_leader else None
    return RolloutEngine(backend, layout, timeout=timeout), backend

def holds(backend, weights=None):
    return backend is None or all(m.holds(weights or checkpoint()) for m in backend.models)

def refused(kind, call, engine, *args, **named):
    # The error, of this very kind; its text is the same on all ranks of the engine.
    error = refusals.refused(kind, call, engine, *args, **named)
    assert type(error) is kind, repr(error)
    texts = gathered(str(error), engine.layout.tp_group)
    assert len(set(texts)) == 1, texts
    return error

@contextlib.contextmanager
def corrupted(change):
    # Changes the models after each of their loads in the block.
    def corrupting(model, named, load, loads=load_check.watched):
        result = loads(model, named, load)
        change(model)
        return result
    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(load_check, "watched", corrupting)
        yield

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
