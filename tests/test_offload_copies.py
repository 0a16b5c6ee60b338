"""Copies of what is offloaded, how long it lives, and how often it moves."""

import copy
import gc
import pickle

import pytest

import memsaver
from memsaver.integrations.trainer import offload

torch = pytest.importorskip("torch")

from trainers import Trainer, addresses_of  # noqa: E402


def test_copies_of_a_model_and_an_optimizer_are_free(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    trainer.step()
    model, optimizer = copy.deepcopy(trainer.model), copy.deepcopy(trainer.optimizer)
    loaded = pickle.loads(pickle.dumps(trainer.model))
    x = torch.ones(1, 32)
    expected = trainer.model(x)
    with offloaded.paused():
        assert torch.equal(model(x), expected)
        assert torch.equal(loaded(x), expected)
        optimizer.step()
        loaded.load_state_dict(model.state_dict())
        with pytest.raises(memsaver.InvalidStateError):
            trainer.model(x)


def test_what_is_offloaded_dies_with_its_trainer(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    trainer.step()
    with offloaded.paused():
        pass
    assert sim.tag_bytes() > 0
    gc.collect()
    gc.disable()  # by reference counts alone: no cycle keeps device memory
    try:
        del trainer
        assert sim.tag_bytes() == 0
        assert offloaded.bytes == 0
    finally:
        gc.enable()
    with offloaded.paused():
        pass


def test_addresses_of_what_exists_change_once(sim, tag):
    trainer = Trainer()
    trainer.step()
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    addresses = addresses_of(trainer)
    for _ in range(3):
        trainer.step()
        with offloaded.paused():
            pass
    again = offload(trainer.model, trainer.optimizer, tag=offloaded.tag)
    assert again.bytes == offloaded.bytes
    assert addresses_of(trainer) == addresses
