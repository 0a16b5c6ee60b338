"""Test sessions with a RolloutEngine whose model loads weights like SGLang's, end to end."""

import itertools

import pytest
import torch
import weight_engine
from weight_engine import Backend, checkpoint, module_of

from memsaver.integrations.engine.status import Status
from memsaver.integrations.engine.tags import RELEASE_ORDER
from memsaver.integrations.rollout import ColocatedSession, RolloutEngine, Stage
from memsaver.integrations.trainer import offload

pytestmark = pytest.mark.each_python

ALL = frozenset(RELEASE_ORDER)


class Control(weight_engine.Control):
    """A fake of an engine's sleep, after which the weights are NaNs."""

    def __init__(self, models) -> None:
        super().__init__()
        self._models = models

    def sleep(self, tags=None, **options):
        for model in self._models:
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
        return super().sleep(tags, **options)


@pytest.fixture
def backend(monkeypatch, tensors_in_files):
    with weight_engine.hooked(monkeypatch) as kind:
        made = Backend(kind)
        made.control = Control(made.models)
        yield made


@pytest.fixture
def scene(sim, tag, backend):
    trainer = module_of(checkpoint(1))
    trainer.lm_head.weight = trainer.embed.weight
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    engine = RolloutEngine(backend, timeout=30)
    versions = itertools.count(1)
    session = ColocatedSession(
        engine,
        offload(trainer, tag=tag("model")),
        offload(optimizer, tag=tag("optimizer")),
        state=trainer.state_dict,
        update_options=lambda: {
            "bucket_bytes": 1024,
            "verify": "full",
            "version": f"{next(versions)}",
        },
    )
    found = {"session": session, "trainer": trainer, "optimizer": optimizer}
    yield found
    found.clear()


def train(scene) -> dict[str, torch.Tensor]:
    """Run a step; return the weights after it."""
    sum(parameter.square().sum() for parameter in scene["trainer"].parameters()).backward()
    scene["optimizer"].step()
    scene["optimizer"].zero_grad()
    return {name: tensor.clone() for name, tensor in scene["trainer"].state_dict().items()}


def test_the_engine_has_the_trainers_weights_in_each_rollout(scene, backend):
    session = scene["session"]
    with session.training():
        weights = train(scene)
    for number in range(3):
        with session.rollout() as engine:
            assert engine.status is Status.AWAKE and backend.version == str(number + 1)
            assert backend.holds(weights)
        assert engine.status is Status.ASLEEP
        update = next(r.result for r in session.stages if r.stage is Stage.UPDATE)
        assert update.held == update.tensors > 0 and update.buckets > 1
        with session.training():
            weights = train(scene)
