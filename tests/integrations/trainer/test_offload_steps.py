"""Tests that an offloaded trainer computes the same steps as a trainer that never pauses."""

import random

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from trainers import (
    OPTIMIZERS,
    Trainer,
    addresses_of,
    bytes_of,
    lies_in,
    pause_and_resume,
    states_of,
    step_all,
)

import memsaver
from memsaver.integrations.trainer import offload

STEPS = 12  # after which the pattern of pauses and gradients begins again


def is_counter(optimizer, tensor):
    return any(tensor is state.get("step") for state in optimizer.state.values())


@pytest.mark.parametrize(
    ("optimizer", "accumulate"),
    [*((name, False) for name in OPTIMIZERS), ("adamw", True), ("sgd_momentum", True)],
)
def test_steps_between_pauses_are_bit_equal(sim, tag, optimizer, accumulate):
    expected = Trainer(optimizer, accumulate=accumulate)
    trainer = Trainer(optimizer, accumulate=accumulate)
    states, weights = tag("optimizer"), tag("model")
    offload(trainer.optimizer, tag=states)
    offload(trainer.model, tag=weights)
    pauses = []

    def pause():
        with memsaver.paused(states, weights):
            assert sim.tag_bytes() == 0
        pauses.append(trainer.done)

    for step in range(STEPS):
        expected.step()
        trainer.step(pause if step % 4 == 1 else lambda: None)
        if step % 3 == 0:
            pause()
        assert trainer.contents() == expected.contents(), step
    assert len(pauses) >= 7


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_pause_takes_all_states_and_keeps_their_addresses(sim, tag, optimizer):
    trainer = Trainer(optimizer)
    offloaded = offload(trainer.optimizer, parameters=True, tag=tag())
    for _ in range(3):
        trainer.step()
    offloaded.pause()  # moves the tensors that LBFGS replaced
    offloaded.resume()
    addresses, contents = addresses_of(trainer), trainer.contents()
    report = offloaded.pause()
    assert report.bytes >= offloaded.bytes > 0
    assert sim.tag_bytes() == 0
    assert offloaded.bytes_elsewhere == 0
    on_device = [t for t in states_of(trainer.optimizer) if not is_counter(trainer.optimizer, t)]
    gradients = [p.grad for p in trainer.model.parameters()]
    for tensor in [*on_device, *trainer.model.parameters(), *gradients]:
        assert lies_in(tensor, offloaded.tag)
        assert not sim.accessible(tensor.data_ptr())
    offloaded.resume()
    assert addresses_of(trainer) == addresses
    assert trainer.contents() == contents


def test_states_are_in_the_tag_from_the_step_that_makes_them_and_counters_stay(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    assert offloaded.bytes == 0
    assert memsaver.state(offloaded.tag) == "mapped"  # exists before it has memory
    trainer.step()
    moments = [t for t in states_of(trainer.optimizer) if not is_counter(trainer.optimizer, t)]
    assert all(lies_in(t, offloaded.tag) for t in moments)
    assert offloaded.bytes == sum(t.nbytes for t in moments)
    addresses = addresses_of(trainer)
    with offloaded.paused():
        counters = [state["step"] for state in trainer.optimizer.state.values()]
        assert [float(counter) for counter in counters] == [1.0] * len(counters)
        assert not any(lies_in(counter, offloaded.tag) for counter in counters)
    trainer.step()
    assert addresses_of(trainer) == addresses


def test_gradients_are_paused_and_restored_and_may_be_dropped_meanwhile(sim, tag):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.backward()
    gradients = [p.grad for p in trainer.model.parameters()]
    contents = [bytes_of(g) for g in gradients]
    assert offloaded.bytes_elsewhere == sum(g.nbytes for g in gradients)
    with offloaded.paused():
        assert offloaded.bytes == sum(g.nbytes for g in gradients)
        assert not any(sim.accessible(g.data_ptr()) for g in gradients)
    assert [bytes_of(g) for g in gradients] == contents
    assert all(p.grad is g for p, g in zip(trainer.model.parameters(), gradients, strict=True))
    step_all(trainer, expected)
    del gradients
    with offloaded.paused():
        trainer.optimizer.zero_grad(set_to_none=True)
        assert sim.tag_bytes() == 0
    expected.optimizer.zero_grad(set_to_none=True)
    step_all(trainer, expected)
    assert trainer.contents() == expected.contents()


def test_gradients_can_stay(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag(), gradients=False)
    trainer.step()
    with offloaded.paused():
        for parameter in trainer.model.parameters():
            assert not lies_in(parameter.grad, offloaded.tag)
            bytes_of(parameter.grad)  # is readable


@pytest.mark.parametrize(
    ("backup", "of_the_pause"),
    [("host", None), ("pageable", None), ("disk", None), ("host", "disk")],
)
def test_every_backup_keeps_the_contents(sim, tag, backup, of_the_pause):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, trainer.model, tag=tag(), backup=backup)
    assert memsaver.stats()[offloaded.tag][0].backup == backup
    trainer.step()
    contents = trainer.contents()
    offloaded.pause(backup=of_the_pause)
    row = memsaver.stats()[offloaded.tag][0]
    assert sim.tag_bytes() == 0 and (row.disk_bytes > 0) == ("disk" in (backup, of_the_pause))
    offloaded.resume()
    assert trainer.contents() == contents


def test_all_of_memsavers_own_calls_gather_first(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    other = tag("engine")
    with memsaver.region(other):
        pass

    for transition in (
        lambda: memsaver.pause(offloaded.tag),
        memsaver.pause,
        lambda: memsaver.pause(offloaded.tag, wait=False).wait(),
        lambda: memsaver.swap(out=offloaded.tag, into=other),
    ):
        memsaver.resume()
        trainer.optimizer.zero_grad()
        trainer.backward()
        contents = trainer.contents()
        gradients = [p.grad for p in trainer.model.parameters()]
        assert not any(lies_in(gradient, offloaded.tag) for gradient in gradients)
        transition()
        assert all(lies_in(gradient, offloaded.tag) for gradient in gradients)
        assert sim.tag_bytes() == 0
        memsaver.resume()
        assert trainer.contents() == contents


def test_memory_of_dropped_gradients_is_not_kept(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()
    sizes = []
    for _ in range(4):
        trainer.step()
        pause_and_resume(offloaded)
        sizes.append(memsaver.stats()[offloaded.tag][0].allocated_bytes)
    assert len(set(sizes)) == 1


# --- random trainings -----------------------------------------------------------------------------


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


def test_a_step_goes_on_while_other_optimizers_are_offloaded_and_released(sim, tag):
    """The test imitates another thread or a garbage collection that changes what memsaver
    watches.
    """
    trainer, others = Trainer(), [Trainer() for _ in range(3)]
    handles = []

    def disturb(*_):
        for one in others:
            handles.append(offload(one.optimizer, tag=tag("others")))
        handles.pop(0).close()

    disturbing = register_optimizer_step_pre_hook(disturb)
    offload(trainer.optimizer, tag=tag("mine"))
    try:
        trainer.step()
    finally:
        disturbing.remove()
