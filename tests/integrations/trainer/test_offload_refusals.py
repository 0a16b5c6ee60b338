"""Tests rejected calls: work or `close` while the tag is paused, and invalid offloads."""

import asyncio
import copy
import gc
import importlib
import weakref
from unittest import mock

import pytest
import torch
from trainers import Trainer, addresses_of, lies_in, pause_and_resume, step_all

import memsaver
from memsaver._runtime.native import _C, backup_code
from memsaver.integrations.trainer import offload

# --- while paused ---------------------------------------------------------------------------------


def test_work_while_paused_is_refused_with_advice_and_changes_nothing(sim, tag):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    step_all(trainer, expected)
    for one in (trainer, expected):
        one.backward()
    x = torch.ones(1, 32)
    shallow = copy.copy(trainer.model)  # with the same parameters
    states = trainer.optimizer.state_dict()
    weights = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    part = {k: v.clone() for k, v in trainer.model[0].state_dict().items()}
    uses = (
        lambda: trainer.optimizer.load_state_dict(states),
        lambda: trainer.model(x),
        lambda: trainer.model.load_state_dict(weights),
        lambda: trainer.model[0](x),
        lambda: trainer.model[0].load_state_dict(part),
        lambda: shallow(x),
    )
    contents = trainer.contents()
    with offloaded.paused():
        with pytest.raises(memsaver.InvalidStateError, match="resume it first"):
            offloaded.close()
        for use in (trainer.optimizer.step, *uses):
            with pytest.raises(memsaver.InvalidStateError) as caught:
                use()
            assert caught.value.tag == offloaded.tag
            assert f"memsaver.resume({offloaded.tag!r})" in str(caught.value)
    assert trainer.contents() == contents
    for use in uses:
        use()
    for one in (trainer, expected):
        one.optimizer.step()
    assert trainer.contents() == expected.contents()
    assert not trainer.model[0]._forward_pre_hooks  # hooks cost time, and disable fast paths
    with sim.fault("cuMemUnmap", sim.OUT_OF_MEMORY), pytest.raises(memsaver.MemsaverError):
        offloaded.pause()
    assert offloaded.state == "mapped"
    assert not trainer.model[0]._forward_pre_hooks
    trainer.model.append(torch.nn.Linear(8, 8))  # is offloaded in the next pause
    added = {k: v.clone() for k, v in trainer.model[-1].state_dict().items()}
    with offloaded.paused(), pytest.raises(memsaver.InvalidStateError):
        trainer.model[-1].load_state_dict(added)
    offloaded.close()


def test_a_gradient_scaler_after_unscaling_is_refused_too(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()
    scaler = torch.amp.GradScaler("cpu")
    trainer.optimizer.zero_grad()
    scaler.scale(trainer.model(torch.ones(1, 32)).square().mean()).backward()
    scaler.unscale_(trainer.optimizer)  # reads the gradients, which must be mapped
    with offloaded.paused(), pytest.raises(memsaver.InvalidStateError):
        scaler.step(trainer.optimizer)
    scaler.step(trainer.optimizer)


@pytest.mark.each_python
def test_compiled_code_is_refused_too(sim, tag):
    trainer = Trainer()
    whole = torch.compile(trainer.model, backend="eager", fullgraph=True)
    optimizer_step = torch.compile(trainer.optimizer.step, backend="eager")
    weights = offload(whole, tag=tag("model"))
    states = offload(trainer.optimizer, tag=tag("optimizer"))
    x = torch.ones(2, 32)
    whole(x).sum().backward()
    optimizer_step()
    assert weights.bytes == sum(p.nbytes for p in trainer.model.parameters())
    assert states.bytes == 2 * weights.bytes
    with states.paused(), pytest.raises(memsaver.InvalidStateError):
        optimizer_step()
    with weights.paused(), pytest.raises(memsaver.InvalidStateError):
        whole(x)
    whole(x)
    optimizer_step()
    # Hooks leave code that is compiled later in one graph.
    expected = trainer.model(x)
    assert torch.equal(torch.compile(trainer.model, backend="eager", fullgraph=True)(x), expected)


def test_an_exception_in_the_block_resumes_the_tag(sim, tag):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    step_all(trainer, expected)
    with pytest.raises(KeyError), offloaded.paused():
        raise KeyError
    assert offloaded.state == "mapped"
    assert trainer.contents() == expected.contents()
    offloaded.pause()
    pause_and_resume(offloaded)
    assert offloaded.state == "paused"  # as it was


@pytest.mark.each_python
def test_paused_is_around_functions_and_coroutines(sim, tag):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()

    @offloaded.paused()
    def work():
        return str(offloaded.state)

    @offloaded.paused()
    async def later():
        return str(offloaded.state)

    assert [work(), work(), asyncio.run(later())] == ["paused"] * 3
    assert offloaded.state == "mapped"

    def generator():
        yield offloaded.state

    with pytest.raises(memsaver.ConfigError, match="runs after its call"):
        offloaded.paused()(generator)
    offloaded.close()
    with pytest.raises(memsaver.InvalidStateError, match="closed"):
        work()


# --- optimizers beside paused memory --------------------------------------------------------------


def step_hooks():
    return importlib.import_module("torch.optim.optimizer")._global_optimizer_pre_hooks


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("targets", ["model", "parameters", "gradients"])
def test_the_step_of_an_optimizer_beside_the_targets_is_refused(sim, tag, targets, with_states):
    trainer, other = Trainer(), Trainer()
    if with_states:
        states = offload(trainer.optimizer, tag=tag("optimizer"), gradients=False)
    trainer.step()
    parameters = list(trainer.model.parameters())
    named = {
        "model": trainer.model,
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
    }
    offloaded = offload(named[targets], tag=tag(), gradients=not with_states)
    hooks = len(step_hooks())
    contents = trainer.contents()
    with offloaded.paused():
        with pytest.raises(memsaver.InvalidStateError, match=r"parameter|gradient") as caught:
            trainer.optimizer.step()
        assert caught.value.tag == offloaded.tag
        assert not with_states or states.state == "mapped"
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


# --- closing --------------------------------------------------------------------------------------


@pytest.mark.each_python
def test_closing_leaves_the_tensors_in_the_tag(sim, tag):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    step_all(trainer, expected)
    addresses = addresses_of(trainer)
    offloaded.close()
    offloaded.close()
    assert addresses_of(trainer) == addresses
    with memsaver.paused(offloaded.tag):
        assert not any(lies_in(p.grad, offloaded.tag) for p in trainer.model.parameters())
        assert sim.tag_bytes() == 0
    step_all(trainer, expected)
    assert trainer.contents() == expected.contents()
    for call in (offloaded.pause, offloaded.resume, lambda: offloaded.paused().__enter__()):
        with pytest.raises(memsaver.InvalidStateError):
            call()
    again = offload(trainer.model, trainer.optimizer, tag=offloaded.tag)
    with again.paused():
        assert sim.tag_bytes() == 0
    assert trainer.contents() == expected.contents()


# --- bad calls ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        ((), {}),
        (([],), {}),
        (("optimizer",), {}),
        ((None,), {}),
        ((object(),), {}),
        ((mock.MagicMock(),), {}),
        ((torch.ones(2),), {"backup": "cloud"}),
        ((torch.ones(2),), {"tag": ""}),
        ((torch.ones(2),), {"tag": 3}),
    ],
)
def test_invalid_targets_and_options_are_rejected(sim, tag, targets, options):
    with pytest.raises(memsaver.ConfigError):
        offload(*targets, **{"tag": tag(), **options})
    assert sim.tag_bytes() == 0


def test_targets_without_hooks_are_rejected_before_anything_moves(sim, tag):
    module = torch.jit.script(torch.nn.Linear(8, 8))
    name = tag()
    with pytest.raises(memsaver.ConfigError, match="accepts none"):
        offload(Trainer().optimizer, module, tag=name)
    with pytest.raises(memsaver.UnknownTagError):
        memsaver.state(name)


def test_a_paused_tag_is_refused(sim, tag):
    name = tag()
    with memsaver.region(name):
        pass
    trainer = Trainer()
    addresses = addresses_of(trainer)
    with memsaver.paused(name), pytest.raises(memsaver.InvalidStateError):
        offload(trainer.model, tag=name)
    assert addresses_of(trainer) == addresses
    trainer.step()


def test_memory_of_another_tag_is_refused_before_anything_moves(sim, tag):
    trainer = Trainer()
    offload(trainer.model[3], tag=tag("first"))
    address = trainer.model[0].weight.data_ptr()
    kept, new = tag("kept"), tag("new")
    with memsaver.region(kept, backup="disk"):
        pass
    for name in (kept, new):
        with pytest.raises(memsaver.ConfigError, match="is already in tag 'first"):
            offload(trainer.optimizer, trainer.model, tag=name, backup="pageable")
    assert trainer.model[0].weight.data_ptr() == address
    assert lies_in(trainer.model[3].weight, tag.names[0])
    assert _C.tag_backup(kept) == backup_code("disk")
    with pytest.raises(memsaver.UnknownTagError):
        memsaver.state(new)
    with memsaver.paused(kept):
        trainer.optimizer.step()  # this one is not watched either


def test_an_optimizer_goes_to_one_tag(sim, tag):
    trainer = Trainer()  # has no states, whose tag would be known
    first, second = tag("first"), tag("second")
    offloaded = offload(trainer.optimizer, tag=first)
    with pytest.raises(memsaver.ConfigError, match="first"):
        offload(trainer.optimizer, tag=second)
    again = offload(trainer.optimizer, tag=first)
    offloaded.close()
    with pytest.raises(memsaver.ConfigError, match="first"):
        offload(trainer.optimizer, tag=second)
    again.close()
    offload(trainer.optimizer, tag=second)
    trainer.step()
    assert lies_in(trainer.optimizer.state[trainer.model[0].weight]["exp_avg"], second)


def test_gradients_in_another_tag_stay_there(sim, tag):
    trainer, expected = Trainer(), Trainer()
    weights = offload(trainer.model, tag=tag("model"))
    states = offload(trainer.optimizer, tag=tag("optimizer"))
    step_all(trainer, expected)
    gradient = next(trainer.model.parameters()).grad
    with weights.paused():
        assert lies_in(gradient, weights.tag)
        with states.paused():
            assert lies_in(gradient, weights.tag)
            assert sim.tag_bytes() == 0
    assert trainer.contents() == expected.contents()


def test_memory_with_untracked_users_is_rejected_on_the_simulator(sim, tag):
    model = torch.nn.Linear(8, 8)
    out = model(torch.ones(2, 8, requires_grad=True))  # its graph has a view of the weight
    address = model.weight.data_ptr()
    name = tag()
    with pytest.raises(memsaver.InvalidStateError, match="collector does not track"):
        offload(model, tag=name)
    assert model.weight.data_ptr() == address
    del out
    assert offload(model, tag=name).bytes == model.weight.nbytes + model.bias.nbytes


def test_the_simulator_reports_a_frozen_collector(sim, tag):
    model = torch.nn.Linear(8, 8)
    gc.collect()
    gc.freeze()
    try:
        with pytest.raises(memsaver.InvalidStateError, match=r"gc\.unfreeze\(\)"):
            offload(model, tag=tag())
    finally:
        gc.unfreeze()
    offload(model, tag=tag())
