"""Tests copies of offloaded objects, the objects' lifetimes, and transfers of their memory."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from trainers import (
    Trainer,
    addresses_of,
    assert_same_steps,
    lies_in,
    pause_and_resume,
)

import memsaver
from memsaver._transitions import observers
from memsaver.integrations.trainer import offload

pytestmark = pytest.mark.each_python


@pytest.mark.parametrize("by_layer", [False, True])
def test_copies_of_a_model_and_an_optimizer_are_free(sim, tag, by_layer):
    trainer = Trainer()
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag(), by_layer=by_layer)
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


def test_offloaded_memory_is_freed_with_its_trainer(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    trainer.step()
    pause_and_resume(offloaded)
    assert sim.tag_bytes() > 0
    gc.collect()
    gc.disable()  # reference counts suffice: no cycle keeps device memory
    try:
        del trainer
        assert sim.tag_bytes() == 0
        assert offloaded.bytes == 0
    finally:
        gc.enable()
    pause_and_resume(offloaded)


def test_addresses_of_what_exists_change_once(sim, tag):
    trainer = Trainer()
    trainer.step()
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    addresses = addresses_of(trainer)
    for _ in range(3):
        trainer.step()
        pause_and_resume(offloaded)
    again = offload(trainer.model, trainer.optimizer, tag=offloaded.tag)
    assert again.bytes == offloaded.bytes
    assert addresses_of(trainer) == addresses


def test_nothing_is_registered_for_a_dead_trainer(sim, tag):
    name = tag()
    gone = []
    for _ in range(3):
        trainer = Trainer()
        offload(trainer.optimizer, tag=name)
        gone.append(weakref.ref(trainer.optimizer))
        del trainer
    gc.collect()
    assert not any(reference() for reference in gone)
    with memsaver.paused(name):
        pass
    for callbacks in (observers._before_pause, observers._after_resume):
        assert not any(callback.concerns(name) for callback in callbacks)


def test_gradients_of_tensors_go_along_as_long_as_the_handle_lives(sim, tag):
    tensor = torch.nn.Parameter(torch.ones(64))
    offloaded = offload(tensor, tag=tag())
    tensor.square().sum().backward()
    assert offloaded.bytes_elsewhere == tensor.grad.nbytes
    with offloaded.paused():
        assert lies_in(tensor.grad, offloaded.tag)
    assert tensor.grad.tolist() == [2] * 64
    del offloaded
    tensor.grad = torch.ones(64)
    with memsaver.paused(tag.names[0]):
        assert not lies_in(tensor.grad, tag.names[0])


@pytest.mark.parametrize("inference", [False, True])
def test_memory_that_torch_replaces_moves_with_the_next_pause_in_any_mode(sim, tag, inference):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    for one in (trainer, expected):
        one.step()
        one.model.double().float()
    assert not lies_in(trainer.model[0].weight, offloaded.tag)
    with torch.inference_mode(inference):
        pause_and_resume(offloaded)
        offload(trainer.model, tag=offloaded.tag)
    assert lies_in(trainer.model[0].weight, offloaded.tag)
    assert_same_steps(trainer, expected, offloaded)


def test_inference_tensors_stay_inference_tensors(sim, tag):
    with torch.inference_mode():
        tensor = torch.arange(64.0)
    offloaded = offload(tensor, tag=tag())
    assert tensor.is_inference()
    with offloaded.paused():
        assert sim.tag_bytes() == 0
    assert tensor.tolist() == list(range(64))


def test_states_that_are_replaced_go_with_the_next_pause(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()
    state = trainer.optimizer.state[trainer.model[0].weight]
    state["exp_avg"] = state["exp_avg"].clone()
    trainer.step()  # only the number of states is compared
    assert not lies_in(state["exp_avg"], offloaded.tag)
    with offloaded.paused():
        assert lies_in(state["exp_avg"], offloaded.tag)


def test_gradients_that_stay_keep_their_addresses_from_the_first_pause_on(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())

    def step():
        trainer.optimizer.zero_grad(set_to_none=False)
        trainer.backward()
        trainer.optimizer.step()
        return [parameter.grad.data_ptr() for parameter in trainer.model.parameters()]

    before = step()
    pause_and_resume(offloaded)
    after = step()
    assert not set(before) & set(after)
    for _ in range(2):
        pause_and_resume(offloaded)
        assert step() == after
