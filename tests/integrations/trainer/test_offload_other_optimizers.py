"""Test steps of optimizers that are not offloaded, beside targets that are paused."""

import gc
import importlib
import weakref

import pytest

import memsaver
from memsaver.integrations.trainer import offload

torch = pytest.importorskip("torch")

from trainers import Trainer  # noqa: E402


def step_hooks():
    return importlib.import_module("torch.optim.optimizer")._global_optimizer_pre_hooks


@pytest.mark.parametrize("targets", ["model", "parameters", "gradients"])
def test_the_step_of_an_optimizer_beside_the_targets_is_refused(sim, tag, targets):
    trainer = Trainer()
    other = Trainer()
    trainer.step()
    parameters = list(trainer.model.parameters())
    named = {
        "model": trainer.model,
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
    }
    offloaded = offload(named[targets], tag=tag())
    hooks = len(step_hooks())
    contents = trainer.contents()
    with offloaded.paused():
        with pytest.raises(memsaver.InvalidStateError, match=r"parameter|gradient") as caught:
            trainer.optimizer.step()
        assert caught.value.tag == offloaded.tag
        other.step()
    assert trainer.contents() == contents
    assert len(step_hooks()) == hooks
    trainer.optimizer.step()


def test_an_optimizer_with_its_memory_in_two_paused_tags_names_one_that_is_paused(sim, tag):
    trainer = Trainer()
    weights = [offload(part, tag=tag()) for part in (trainer.model[0], trainer.model[3])]
    trainer.step()
    for one in weights:
        one.pause()
    for one in weights:
        with pytest.raises(memsaver.InvalidStateError) as caught:
            trainer.optimizer.step()
        assert caught.value.tag == one.tag
        one.resume()
    trainer.step()


def test_the_hook_for_all_steps_keeps_nothing_alive_and_goes_with_the_model(sim, tag):
    hooks = len(step_hooks())
    trainer = Trainer()
    alive = weakref.ref(trainer.model), weakref.ref(trainer.optimizer)
    offloaded = offload(trainer.model, tag=tag())
    trainer.step()
    offloaded.pause()
    with pytest.raises(memsaver.InvalidStateError):
        trainer.optimizer.step()
    name = offloaded.tag
    del trainer, offloaded
    gc.collect()
    assert [ref() for ref in alive] == [None, None]
    assert len(step_hooks()) == hooks
    memsaver.resume(name)


def test_compiled_steps_of_optimizers_beside_the_targets_are_refused_too(sim, tag):
    trainer, other = Trainer(), Trainer()
    steps = [torch.compile(one.optimizer.step, backend="eager") for one in (trainer, other)]
    for one, step in zip((trainer, other), steps, strict=True):
        one.backward()
        step()
    offloaded = offload(trainer.model, tag=tag())
    contents = trainer.contents()
    with offloaded.paused():
        with pytest.raises(memsaver.InvalidStateError):
            steps[0]()
        steps[1]()
    assert trainer.contents() == contents != other.contents()
    steps[0]()
    assert trainer.contents() == other.contents()
