"""Test that random trainings with pauses in any order compute the same as without pauses."""

import random

import pytest

import memsaver
from memsaver.integrations.trainer import offload

torch = pytest.importorskip("torch")

from trainers import Trainer, bytes_of, states_of  # noqa: E402


def new_group(trainer, seed):
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(8, generator=generator))
    parameter.grad = torch.ones(8)
    trainer.extra.append(parameter)
    trainer.optimizer.add_param_group({"params": [parameter]})


def reload(trainer, seed):
    saved = trainer.optimizer.state_dict()
    copied = {
        index: {key: value.clone() for key, value in state.items()}
        for index, state in saved["state"].items()
    }
    trainer.optimizer.load_state_dict({**saved, "state": copied})


# The operations of both trainers, by name. Each takes a seed.
OPERATIONS = {
    "step": lambda trainer, seed: trainer.step(),
    "backward": lambda trainer, seed: trainer.backward(seed) and None,
    "zero_grad": lambda trainer, seed: trainer.optimizer.zero_grad(bool(seed % 2)),
    "clear": lambda trainer, seed: trainer.optimizer.state.clear(),
    "forget": lambda trainer, seed: trainer.optimizer.state.pop(trainer.model[0].weight, None),
    "reload": reload,
    "group": new_group,
}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum"])
@pytest.mark.parametrize("seed", range(2))
def test_a_random_training_with_pauses_equals_one_without(sim, tag, optimizer, seed):
    chance = random.Random(seed)
    trainer, twin = Trainer(optimizer), Trainer(optimizer)
    for one in (trainer, twin):
        one.extra = []
    handles = [offload(trainer.optimizer, tag=tag("o")), offload(trainer.model, tag=tag("m"))]
    for _ in range(25):
        name = chance.choice([*OPERATIONS, "pause", "pause", "refused", "again"])
        if name in OPERATIONS:
            number = chance.randrange(100)
            for one in (trainer, twin):
                OPERATIONS[name](one, number)
        elif name == "pause":
            with memsaver.paused(*(h.tag for h in chance.sample(handles, chance.choice([1, 2])))):
                pass
        elif name == "refused":
            with chance.choice(handles).paused(), pytest.raises(memsaver.InvalidStateError):
                trainer.optimizer.step()
        else:
            handles[0].close()
            handles[0] = offload(trainer.optimizer, tag=handles[0].tag)
        assert trainer.contents() == twin.contents(), name
        assert [bytes_of(p) for p in trainer.extra] == [bytes_of(p) for p in twin.extra], name
        assert len(states_of(trainer.optimizer)) == len(states_of(twin.optimizer))
