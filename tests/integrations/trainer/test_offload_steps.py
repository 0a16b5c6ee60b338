"""Test that an offloaded trainer computes the same steps as a trainer that never pauses."""

import pytest

import memsaver
from memsaver.integrations.trainer import offload

torch = pytest.importorskip("torch")

from trainers import OPTIMIZERS, Trainer, addresses_of, bytes_of, lies_in, states_of  # noqa: E402

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


def test_step_counters_stay_on_the_host(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()
    with offloaded.paused():
        counters = [state["step"] for state in trainer.optimizer.state.values()]
        assert [float(counter) for counter in counters] == [1.0] * len(counters)
        assert not any(lies_in(counter, offloaded.tag) for counter in counters)


def test_states_are_in_the_tag_from_the_step_that_makes_them(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    assert offloaded.bytes == 0
    assert memsaver.state(offloaded.tag) == "mapped"  # exists before it has memory
    trainer.step()
    moments = [t for t in states_of(trainer.optimizer) if not is_counter(trainer.optimizer, t)]
    assert all(lies_in(t, offloaded.tag) for t in moments)
    assert offloaded.bytes == sum(t.nbytes for t in moments)
    addresses = addresses_of(trainer)
    trainer.step()
    with offloaded.paused():
        pass
    assert addresses_of(trainer) == addresses


def test_gradients_are_paused_and_restored(sim, tag):
    trainer = Trainer()
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


def test_gradients_may_be_dropped_while_paused(sim, tag):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()
    expected.step()
    with offloaded.paused():
        trainer.optimizer.zero_grad(set_to_none=True)
        assert sim.tag_bytes() == 0
    expected.optimizer.zero_grad(set_to_none=True)
    trainer.step()
    expected.step()
    assert trainer.contents() == expected.contents()


def test_gradients_can_stay(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag(), gradients=False)
    trainer.step()
    with offloaded.paused():
        for parameter in trainer.model.parameters():
            assert not lies_in(parameter.grad, offloaded.tag)
            bytes_of(parameter.grad)  # is readable


@pytest.mark.parametrize("backup", ["host", "pageable", "disk"])
def test_every_backup_keeps_the_contents(sim, tag, backup):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, trainer.model, tag=tag(), backup=backup)
    trainer.step()
    contents = trainer.contents()
    with offloaded.paused():
        assert sim.tag_bytes() == 0
    assert trainer.contents() == contents
    assert memsaver.stats()[offloaded.tag][0].backup == backup


def test_a_pause_may_choose_another_backup(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()
    contents = trainer.contents()
    offloaded.pause(backup="disk")
    assert memsaver.stats()[offloaded.tag][0].disk_bytes > 0
    offloaded.resume()
    assert trainer.contents() == contents


def test_all_of_memsavers_own_calls_gather_first(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    other = tag("engine")
    with memsaver.region(other):
        pass

    def transitions():
        yield lambda: memsaver.pause(offloaded.tag)
        yield lambda: memsaver.pause()
        yield lambda: memsaver.pause(offloaded.tag, wait=False).wait()
        yield lambda: memsaver.swap(out=offloaded.tag, into=other)

    for transition in transitions():
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
        with offloaded.paused():
            pass
        sizes.append(memsaver.stats()[offloaded.tag][0].allocated_bytes)
    assert len(set(sizes)) == 1
