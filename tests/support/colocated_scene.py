"""A trainer and an engine on the simulated device, and a session that contains both."""

import torch
from colocated_engine import TagEngine
from trainers import Trainer

import memsaver
from memsaver.integrations.rollout import ColocatedSession, Stage
from memsaver.integrations.trainer import offload

ENTERING = [
    Stage.SETTLE,
    Stage.PAUSE_OPTIMIZER,
    Stage.RESUME_MODEL,
    Stage.WAKE_WEIGHTS,
    Stage.UPDATE,
    Stage.PAUSE_MODEL,
    Stage.WAKE_REST,
]
X = torch.ones(4)


class Scene:
    """A trainer, an engine with the test's own tags, and a session that contains both."""

    def __init__(self, tag, optimizer="adamw", engine=TagEngine, by_layer=False, **options) -> None:
        self.trainer = Trainer(optimizer)
        self.train()
        self.engine = engine(self.trainer.model, tag("weights"), tag("kv"))
        self.tags = tag("model"), tag("optimizer")
        handles = (
            offload(self.trainer.model, tag=self.tags[0], by_layer=by_layer),
            offload(self.trainer.optimizer, tag=self.tags[1]),
        )
        options.setdefault("state", self.trainer.model.state_dict)
        self.session = ColocatedSession(self.engine, *handles, **options)

    def train(self) -> None:
        self.trainer.step()
        self.trainer.optimizer.zero_grad()

    def states(self) -> dict[str, str]:
        names = {"model": self.tags[0], "optimizer": self.tags[1], **self.engine.names}
        return {name: str(memsaver.state(tag)) for name, tag in names.items()}


def paused(scene) -> set[str]:
    return {name for name, state in scene.states().items() if state == "paused"}
