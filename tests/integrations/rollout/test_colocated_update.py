"""Test sessions with a RolloutEngine whose model loads weights like SGLang's, end to end."""

from __future__ import annotations

import itertools

import pytest

import memsaver
from memsaver.integrations.engine.reports import SleepReport
from memsaver.integrations.engine.status import Status, check_operation, status_of
from memsaver.integrations.engine.tags import RELEASE_ORDER
from memsaver.integrations.rollout import ColocatedSession, Phase, RolloutEngine, Stage
from memsaver.integrations.trainer import offload

torch = pytest.importorskip("torch")

import weight_engine  # noqa: E402
from weight_engine import Backend, checkpoint, module_of  # noqa: E402

pytestmark = pytest.mark.each_python

ALL = frozenset(RELEASE_ORDER)


class Control(weight_engine.Control):
    """A fake of an engine's sleep, after which the weights are NaNs."""

    def __init__(self, models) -> None:
        self.released = frozenset()
        self._models = models

    @property
    def status(self) -> Status:
        return status_of(self.released)

    def refresh(self) -> Status:
        return self.status

    def check(self, operation: str) -> None:
        check_operation(operation, self.released)

    def sleep(self, tags=None, *, wait_idle=False, abort=False, flush=False, timeout=60.0):
        assert wait_idle
        self.released = self.released | (frozenset([tags]) if tags else ALL)
        for model in self._models:
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
        return SleepReport((), ())

    def wake_up(self, tags=None, *, timeout=60.0):
        self.released = self.released - (frozenset([tags]) if tags else ALL)
        return SleepReport((), ())


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
    return weights_of(scene)


def weights_of(scene) -> dict[str, torch.Tensor]:
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


def test_a_damaged_bucket_leaves_the_trainer_intact_and_is_sent_again(scene, backend):
    session = scene["session"]
    with session.training():
        weights = train(scene)

    def damage(number):
        if number == 2:
            raise memsaver.integrations.sglang.EngineError("the engine broke down")

    backend.damage = damage
    with pytest.raises(memsaver.integrations.sglang.EngineError, match="broke down"):
        with session.rollout():
            raise AssertionError("nothing may be generated")
    assert session.phase is Phase.IDLE and not session.engine_is_current
    assert session.engine.status is Status.WEIGHTS_ONLY  # its weights are not usable
    with session.training():
        kept = weights_of(scene)
        assert all(torch.equal(kept[name], tensor) for name, tensor in weights.items())
    backend.damage = lambda number: None
    with session.rollout():
        assert backend.holds(weights)
