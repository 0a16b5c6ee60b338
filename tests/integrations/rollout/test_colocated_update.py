"""Tests a session end to end, with a RolloutEngine whose model loads weights as SGLang's does."""

import pytest
import torch
import weight_engine
from weight_engine import checkpoint, module_of

from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.rollout import ColocatedSession, Phase, RolloutEngine, Stage
from memsaver.integrations.trainer import offload


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


class Scene:
    """A session with a fake engine and a trainer, whose weight copies have versions 1, 2 and 3."""

    def __init__(self, backend, tag) -> None:
        backend.control = Control(backend.models)
        self.trainer = module_of(checkpoint(1))
        self.trainer.lm_head.weight = self.trainer.embed.weight
        self.optimizer = torch.optim.AdamW(self.trainer.parameters(), lr=1e-2)
        versions = iter("123")
        self.session = ColocatedSession(
            RolloutEngine(backend, timeout=30),
            offload(self.trainer, tag=tag("model")),
            offload(self.optimizer, tag=tag("optimizer")),
            state=self.trainer.state_dict,
            update_options=lambda: {
                "bucket_bytes": 1024,
                "verify": "full",
                "version": next(versions),
            },
        )

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.trainer.state_dict().items()}

    def train(self):
        """Run a step; return the resulting weights."""
        with self.session.training():
            sum(parameter.square().sum() for parameter in self.trainer.parameters()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return self.weights()


@pytest.fixture
def scene(sim, tag, backend, tensors_in_files):
    found = Scene(backend, tag)
    yield found
    vars(found).clear()  # frees the tags' memory before `sim` looks for it


@pytest.mark.each_python
def test_the_engine_has_the_trainers_weights_in_each_rollout(scene, backend):
    for version in "123":
        weights = scene.train()
        with scene.session.rollout() as engine:
            assert engine.status is Status.AWAKE and backend.version == version
            assert backend.holds(weights)
        assert engine.status is Status.ASLEEP
        update = next(r.result for r in scene.session.stages if r.stage is Stage.UPDATE)
        assert update.held == update.tensors > 0 and update.buckets > 1


def test_a_bucket_that_fails_leaves_the_trainer_intact_and_the_engine_without_a_cache(
    scene, backend
):
    weights = scene.train()

    def damage(number):
        if number == 2:
            raise EngineError("the engine broke down")

    backend.damage = damage
    with pytest.raises(EngineError, match="broke down"):
        with scene.session.rollout():
            raise AssertionError("nothing may be generated")
    assert scene.session.phase is Phase.IDLE and not scene.session.engine_is_current
    assert scene.session.engine.status is Status.WEIGHTS_ONLY
    with scene.session.training():
        assert all(torch.equal(tensor, weights[name]) for name, tensor in scene.weights().items())
    backend.damage = lambda number: None
    with scene.session.rollout():
        assert backend.holds(weights)


def test_the_extra_state_of_a_models_modules_is_not_sent(sim, backend, tensors_in_files):
    class Recipe(torch.nn.Module):
        def get_extra_state(self):
            return {"recipe": "fp8"}

    trainer = module_of(checkpoint(1))
    trainer.add_module("recipe", Recipe())
    session = ColocatedSession(RolloutEngine(backend, timeout=30), trainer, sleep=False)
    with session.rollout():
        assert backend.holds(checkpoint(1))
