"""Code that runs on the ranks of a colocated session: an FSDP2 trainer and a fake engine."""

# Follows the code of distributed_ranks.
PRELUDE = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from memsaver.distributed import GroupError, RankError
from memsaver.integrations.rollout import ColocatedSession, Phase, Stage
from memsaver.integrations.engine.errors import EngineDiedError, EngineTimeoutError
from memsaver.integrations.trainer import offload
from refusals import refused
from colocated_engine import TagEngine, stages_of
from trainers import Trainer, plain_model

begin("gloo")
sim.start()
X = torch.ones(4)
CALLS = ["wake_up weights", "update_weights", "wake_up all", "sleep"]


def sharded():
    model = plain_model()
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(trainer):
    trainer.step()
    trainer.optimizer.zero_grad()


def rollout(inside=lambda engine: None):
    with session.rollout() as engine:
        inside(engine)


def training(inside=lambda: None):
    with session.training():
        inside()


def overlapping(model=None):
    # `model` is the handle of the model, if it has one.
    return ColocatedSession(
        engine,
        trainer.model if model is None else model,
        trainer.optimizer,
        overlap=True,
        timeout=20,
        state=weights,
    )


def weights():
    if "state" in engine.fail:
        raise engine.fail.pop("state")
    return trainer.model.state_dict()


trainer = Trainer("sgd_momentum", model=sharded)
step(trainer)
engine = TagEngine(trainer.model, "weights", "kv_cache")
session = ColocatedSession(engine, trainer.model, trainer.optimizer, timeout=20)
"""
END = "\ndist.destroy_process_group()\n"
