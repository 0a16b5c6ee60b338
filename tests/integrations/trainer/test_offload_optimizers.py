"""Tests optimizers with master weights, groups, loaded states and nesting, and several
optimizers.
"""

import gc
import io

import pytest
import torch
from trainers import (
    Trainer,
    assert_same_steps,
    bytes_of,
    lies_in,
    plain_model,
    states_of,
    step_all,
)

import memsaver
from memsaver.integrations.trainer import offload
from memsaver.integrations.trainer.collection import Collection


def moments_of(trainer):
    states = trainer.optimizer.state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


class MasterWeights:
    """A half-precision model whose optimizer has float32 master weights."""

    def __init__(self):
        torch.manual_seed(7)
        self.model = plain_model().to(torch.bfloat16)
        self.masters = [p.detach().float() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-2)
        self.done = 0

    def step(self):
        generator = torch.Generator().manual_seed(self.done)
        x = torch.randn(4, 32, generator=generator).to(torch.bfloat16)
        self.model(x).square().mean().backward()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
        self.done += 1

    def contents(self):
        tensors = [*self.model.parameters(), *self.masters, *states_of(self.optimizer)]
        return [bytes_of(tensor) for tensor in tensors]


@pytest.mark.parametrize("by", ["parameters", "tensors"])
def test_master_weights_are_offloaded(sim, tag, by):
    trainer, expected = MasterWeights(), MasterWeights()
    if by == "parameters":
        offloaded = offload(trainer.optimizer, parameters=True, tag=tag())
    else:
        offloaded = offload(trainer.optimizer, trainer.masters, tag=tag())
    assert all(lies_in(master, offloaded.tag) for master in trainer.masters)
    assert_same_steps(trainer, expected, offloaded)
    with offloaded.paused():
        assert sim.tag_bytes() == 0
        trainer.model(torch.ones(1, 32, dtype=torch.bfloat16))  # the model's weights stay mapped


def test_a_group_that_is_added_later(sim, tag):
    def make():
        trainer = Trainer()
        trainer.optimizer = torch.optim.AdamW(trainer.model[0].parameters(), lr=1e-2)
        return trainer

    trainer, expected = make(), make()
    offloaded = offload(trainer.optimizer, parameters=True, tag=tag())
    assert_same_steps(trainer, expected, offloaded, 2)
    for one in (trainer, expected):
        one.optimizer.add_param_group({"params": list(one.model[3].parameters()), "lr": 1e-3})
    step_all(trainer, expected)
    grouped = [*trainer.model[0].parameters(), *trainer.model[3].parameters()]
    assert all(lies_in(moment, offloaded.tag) for moment in moments_of(trainer))
    assert all(lies_in(p, offloaded.tag) for p in grouped)
    assert offloaded.bytes_elsewhere == sum(p.grad.nbytes for p in grouped)
    assert_same_steps(trainer, expected, offloaded, 3)


def test_several_optimizers_in_one_tag_or_in_two(sim, tag):
    trainers, expected = [Trainer(), Trainer("rmsprop")], [Trainer(), Trainer("rmsprop")]
    both = offload([trainer.optimizer for trainer in trainers], tag=tag("both"))
    for one, other in zip(trainers, expected, strict=True):
        assert_same_steps(one, other, both)
    first = Trainer("adam_amsgrad")
    second = Trainer("sgd_momentum")
    apart = [offload(first.optimizer, tag=tag("first")), offload(second.optimizer, tag=tag("b"))]
    first.step()
    second.step()
    with apart[0].paused():
        second.step()
        with pytest.raises(memsaver.InvalidStateError):
            first.step()


def test_two_handles_on_one_tag(sim, tag):
    trainer, expected = Trainer(), Trainer()
    name = tag()
    offload(trainer.model, tag=name, backup="disk")
    offloaded = offload(trainer.optimizer, tag=name)
    assert memsaver.stats()[name][0].backup == "disk"  # the second one keeps it
    assert_same_steps(trainer, expected, offloaded)


def hooks_of(trainer):
    found = [
        module.__dict__[hooks]
        for module in trainer.model.modules()
        for hooks in ("_forward_pre_hooks", "_load_state_dict_pre_hooks", "_state_dict_pre_hooks")
    ]
    return sum(map(len, [*found, trainer.optimizer._optimizer_step_pre_hooks]))


@pytest.mark.parametrize("fewer", [False, True])
def test_repeated_calls_replace_the_hooks_of_dropped_handles(sim, tag, fewer):
    trainer, name = Trainer(), tag()
    offload(trainer.model, trainer.optimizer, tag=name)
    once = hooks_of(trainer)
    for _ in range(3):
        if fewer:
            offload(trainer.model, tag=name)
        offload(trainer.optimizer, trainer.model, tag=name)
        assert hooks_of(trainer) == once
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters())  # for another training
        gc.collect()  # deletes the earlier optimizer
        offloaded = offload(trainer.optimizer, trainer.model, tag=name)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters())
    gc.collect()
    offloaded = offload(trainer.optimizer, trainer.model, tag=name)
    offloaded.close()
    assert hooks_of(trainer) == 0


def test_handles_of_repeated_calls_stay_open_until_each_is_closed(sim, tag):
    trainer, expected = Trainer(), Trainer()
    name = tag()
    first = offload(trainer.optimizer, tag=name)
    second = offload(trainer.optimizer, tag=name, gradients=False)
    step_all(trainer, expected)
    with first.paused():
        assert not any(lies_in(p.grad, name) for p in trainer.model.parameters())
    third = offload([trainer.optimizer], tag=name, gradients=True)
    second.close()
    for handle in (first, third):
        assert_same_steps(trainer, expected, handle, steps=2)
        assert lies_in(trainer.model[0].weight.grad, name)
        with handle.paused(), pytest.raises(memsaver.InvalidStateError):
            trainer.optimizer.step()
        handle.close()
    assert (second.is_closed, hooks_of(trainer)) == (True, 0)


def test_a_larger_call_keeps_the_hooks_of_an_open_handle(sim, tag):
    trainer, name = Trainer(), tag()
    weights = offload(trainer.model, tag=name)
    both = offload(trainer.model, trainer.optimizer, tag=name)
    trainer.step()
    assert weights.bytes < both.bytes
    both.close()
    with weights.paused(), pytest.raises(memsaver.InvalidStateError):
        trainer.model(torch.ones(1, 32))
    weights.close()
    assert hooks_of(trainer) == 0


def test_a_close_during_a_call_keeps_the_hooks_of_the_call(sim, tag, monkeypatch):
    """A finalizer or another thread may close a handle while memory is moved."""
    trainer, name = Trainer(), tag()
    both, gather = offload(trainer.model, trainer.optimizer, tag=name), Collection.gather

    def close_and_gather(collection, **options):
        both.close()
        return gather(collection, **options)

    monkeypatch.setattr(Collection, "gather", close_and_gather)
    weights = offload(trainer.model, tag=name)
    monkeypatch.undo()
    with weights.paused(), pytest.raises(memsaver.InvalidStateError):
        trainer.model(torch.ones(1, 32))
    weights.close()
    assert hooks_of(trainer) == 0


def test_load_state_dict_after_offloading(sim, tag):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.optimizer, trainer.model, tag=tag())
    assert_same_steps(trainer, expected, offloaded, 3)
    saved = io.BytesIO()
    torch.save([trainer.model.state_dict(), trainer.optimizer.state_dict()], saved)
    assert_same_steps(trainer, expected, offloaded, 2)
    for one in (trainer, expected):
        saved.seek(0)
        model, optimizer = torch.load(saved)
        one.model.load_state_dict(model)
        one.optimizer.load_state_dict(optimizer)
        one.optimizer.zero_grad()
        one.done = 3
    assert all(lies_in(moment, offloaded.tag) for moment in moments_of(trainer))
    assert_same_steps(trainer, expected, offloaded, 3)


def test_a_state_dict_that_shares_tensors_with_the_optimizer(sim, tag):
    # torch does not copy tensors of the dict that are on the right device.
    trainer, expected = Trainer(), Trainer()
    step_all(trainer, expected)
    offloaded = offload(trainer.optimizer, tag=tag())
    kept = trainer.optimizer.state_dict()
    trainer.optimizer.load_state_dict(kept)
    assert_same_steps(trainer, expected, offloaded)


def test_optimizers_that_step_inside_the_backward_are_offloaded(sim, tag):
    # Optimizers that step as soon as a gradient exists, on autograd's threads.
    def make():
        trainer = Trainer("sgd_momentum")
        trainer.optimizers = {
            p: torch.optim.AdamW([p], lr=1e-2) for p in trainer.model.parameters()
        }

        def step(parameter):
            trainer.optimizers[parameter].step()
            trainer.optimizers[parameter].zero_grad()

        for parameter in trainer.model.parameters():
            hooks.append(parameter.register_post_accumulate_grad_hook(step))
        return trainer

    hooks = []
    trainer, expected = make(), make()
    offloaded = offload(list(trainer.optimizers.values()), trainer.model, tag=tag())
    for number in range(4):
        trainer.backward(number)
        expected.backward(number)
        with offloaded.paused():
            assert sim.tag_bytes() == 0
        for one, other in zip(
            trainer.optimizers.values(), expected.optimizers.values(), strict=True
        ):
            ours, theirs = states_of(one), states_of(other)
            assert [*map(bytes_of, ours)] == [*map(bytes_of, theirs)]
        assert trainer.contents() == expected.contents()
    for hook in hooks:
        hook.remove()


class Accelerated(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.optimizer = optimizer


class Averaging(torch.optim.Optimizer):
    """A wrapper that shares the states of another optimizer."""

    def __init__(self, optim):
        self.optim = optim
        self.param_groups = optim.param_groups

    @property
    def state(self):
        return self.optim.state


class Plain:
    """A wrapper that is not a torch optimizer, such as DeepSpeed's and Megatron-LM's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


class Chained:
    """A wrapper of several wrappers, such as Megatron-LM's."""

    def __init__(self, optimizer):
        self.chained_optimizers = [Plain(self), Plain(optimizer)]


@pytest.mark.parametrize(
    "wrapper",
    [
        Accelerated,
        Averaging,
        lambda optimizer: Accelerated(Plain(optimizer)),
        Chained,
        lambda optimizer: Plain(Chained(Plain(optimizer))),
    ],
    ids=["accelerate", "averaging", "deepspeed", "megatron", "nested"],
)
def test_an_optimizer_inside_another_is_offloaded(sim, tag, wrapper):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(wrapper(trainer.optimizer), tag=tag())
    assert_same_steps(trainer, expected, offloaded)
    assert offloaded.bytes > 0


class Lookahead(torch.optim.Optimizer):
    """An optimizer that wraps another optimizer and maintains slow weights."""

    def __init__(self, optimizer, name):
        super().__init__(optimizer.param_groups, {})
        setattr(self, name, optimizer)
        self.me = self
        self.inner = optimizer
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    def step(self, closure=None):
        self.inner.step(closure)
        with torch.no_grad():
            for parameter, state in self.state.items():
                parameter.copy_(state["slow"].lerp_(parameter, 0.5))


@pytest.mark.parametrize("name", ["optimizer", "optim", "base_optimizer"])
def test_an_optimizer_with_states_around_another(sim, tag, name):
    trainer, expected = Trainer(), Trainer()
    for one in (trainer, expected):
        one.optimizer = Lookahead(one.optimizer, name)
    offloaded = offload(trainer.optimizer, tag=tag())
    step_all(trainer, expected)
    slow = states_of(trainer.optimizer)
    moments = [t for t in states_of(trainer.optimizer.inner) if t.dim()]
    assert all(lies_in(tensor, offloaded.tag) for tensor in [*slow, *moments])
    assert offloaded.bytes == sum(t.nbytes for t in [*slow, *moments])
    assert_same_steps(trainer, expected, offloaded)
    with offloaded.paused():
        for work in (trainer.optimizer.step, trainer.optimizer.inner.step):
            with pytest.raises(memsaver.InvalidStateError):
                work()
