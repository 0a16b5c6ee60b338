"""Test a session with a RolloutEngine whose model loads weights like SGLang's, end to end."""

import pytest
import torch
import weight_engine
from weight_engine import checkpoint, module_of

from memsaver.integrations.engine.status import Status
from memsaver.integrations.rollout import ColocatedSession, RolloutEngine, Stage
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


@pytest.mark.each_python
def test_the_engine_has_the_trainers_weights_in_each_rollout(sim, tag, backend, tensors_in_files):
    backend.control = Control(backend.models)
    trainer = module_of(checkpoint(1))
    trainer.lm_head.weight = trainer.embed.weight
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    versions = iter("123")
    session = ColocatedSession(
        RolloutEngine(backend, timeout=30),
        offload(trainer, tag=tag("model")),
        offload(optimizer, tag=tag("optimizer")),
        state=trainer.state_dict,
        update_options=lambda: {
            "bucket_bytes": 1024,
            "verify": "full",
            "version": next(versions),
        },
    )
    for version in "123":
        with session.training():
            sum(parameter.square().sum() for parameter in trainer.parameters()).backward()
            optimizer.step()
            optimizer.zero_grad()
            weights = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        with session.rollout() as engine:
            assert engine.status is Status.AWAKE and backend.version == version
            assert backend.holds(weights)
        assert engine.status is Status.ASLEEP
        update = next(r.result for r in session.stages if r.stage is Stage.UPDATE)
        assert update.held == update.tensors > 0 and update.buckets > 1
