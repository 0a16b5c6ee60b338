"""Tests failures due to memory shortages or driver errors, and the state after these failures."""

import copy
import warnings

import pytest
import torch
from looks import held
from trainers import (
    Trainer,
    addresses_of,
    lies_in,
    pause_and_resume,
    states_of,
    step_all,
    zero_grad_all,
)

import memsaver
from memsaver.integrations.trainer import offload
from memsaver.integrations.trainer.arrivals import limited_waits

MIB = 1 << 20


def wide_model():
    """Return a model with a first weight of 4 MiB."""
    return torch.nn.Sequential(torch.nn.Linear(32, 32 << 10), torch.nn.Linear(32 << 10, 8))


@pytest.fixture
def leave_free(sim):
    """Return a function that sets the device's free bytes: `leave_free(nbytes)`."""

    def leave(nbytes):
        sim.occupy(0)
        free, _ = memsaver.device_memory()
        sim.occupy(free - nbytes)

    yield leave
    sim.occupy(0)


def test_a_resume_without_room_can_be_made_again(sim, tag, leave_free):
    trainer, expected = Trainer(model=wide_model), Trainer(model=wide_model)
    offloaded = offload(trainer.optimizer, tag=tag())
    for _ in range(2):
        step_all(trainer, expected)
    addresses = addresses_of(trainer)
    offloaded.pause()
    leave_free(4 * MIB)
    with pytest.raises(memsaver.OutOfDeviceMemoryError) as caught:
        offloaded.resume()
    assert caught.value.needed >= offloaded.bytes
    assert offloaded.state == "paused"
    assert memsaver.stats()[offloaded.tag][0].resident_bytes == 0
    with pytest.raises(memsaver.InvalidStateError):
        trainer.optimizer.step()
    sim.occupy(0)
    offloaded.resume()
    assert addresses_of(trainer) == addresses
    for _ in range(3):
        step_all(trainer, expected)
        pause_and_resume(offloaded)
        assert trainer.contents() == expected.contents()


def test_an_offload_without_room_guards_what_it_moved_and_can_be_made_again(sim, tag, leave_free):
    trainer, expected = Trainer(model=wide_model), Trainer(model=wide_model)
    step_all(trainer, expected)
    leave_free(10 * MIB)
    name = tag()
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        offload(trainer.optimizer, tag=name)
    assert trainer.contents() == expected.contents()
    assert any(lies_in(state, name) for state in states_of(trainer.optimizer))
    with pytest.warns(memsaver.MemsaverWarning, match="the next pause"):
        trainer.step()  # works, and tries to move again
    expected.step()
    sim.occupy(0)
    zero_grad_all(trainer, expected)
    with memsaver.paused(name), pytest.raises(memsaver.InvalidStateError):
        trainer.optimizer.step()
    offloaded = offload(trainer.optimizer, tag=name)
    with offloaded.paused():
        assert sim.tag_bytes() == 0
    assert trainer.contents() == expected.contents()
    states = copy.deepcopy(trainer.optimizer.state_dict())
    offloaded.close()
    with memsaver.paused(name):
        trainer.optimizer.load_state_dict(states)  # no longer watched
    trainer.step()


def test_an_offload_that_moved_nothing_guards_nothing(sim, tag, leave_free):
    trainer = Trainer(model=wide_model)
    trainer.step()
    leave_free(0)
    name = tag()
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        offload(trainer.optimizer, trainer.model, tag=name)
    sim.occupy(0)
    with memsaver.paused(name):
        trainer.step()


def test_a_pause_without_room_for_gradients_pauses_nothing(sim, tag, leave_free):
    trainer, expected = Trainer(model=wide_model), Trainer(model=wide_model)
    offloaded = offload(trainer.optimizer, tag=tag())
    step_all(trainer, expected)
    leave_free(2 * MIB)
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        memsaver.pause(offloaded.tag)
    assert offloaded.state == "mapped"
    assert trainer.contents() == expected.contents()
    zero_grad_all(trainer, expected)
    with offloaded.paused():  # without gradients, the memory suffices
        assert memsaver.stats()[offloaded.tag][0].resident_bytes == 0
    assert trainer.contents() == expected.contents()


def test_new_gradients_are_moved_to_the_places_of_deleted_ones(sim, tag, leave_free):
    trainer, expected = Trainer(model=wide_model), Trainer(model=wide_model)
    offloaded = offload(trainer.optimizer, tag=tag())
    step_all(trainer, expected)
    pause_and_resume(offloaded)
    step_all(trainer, expected)
    leave_free(0)
    pause_and_resume(offloaded)
    assert all(lies_in(p.grad, offloaded.tag) for p in trainer.model.parameters())
    assert trainer.contents() == expected.contents()


def test_states_without_room_warn_once_at_the_programs_line(sim, tag, leave_free):
    trainer, loaded = Trainer(model=wide_model), Trainer(model=wide_model)
    loaded.step()
    offloaded = offload(trainer.optimizer, tag=tag())
    leave_free(2 * MIB)

    def warned(work):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
        return [one for one in caught if issubclass(one.category, memsaver.MemsaverWarning)]

    trainer.backward()
    calls = (
        trainer.optimizer.step,
        lambda: trainer.optimizer.load_state_dict(loaded.optimizer.state_dict()),
    )
    for call in calls:
        (warning,) = warned(call)
        assert offloaded.tag in str(warning.message)
        assert warning.filename == __file__
        for _ in range(3):
            assert not warned(trainer.optimizer.step)
    sim.occupy(0)
    with offloaded.paused():
        assert offloaded.bytes_elsewhere == 0


def test_a_step_is_done_whatever_the_move_of_its_states_meets(sim, tag, monkeypatch):
    def refuse(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    with monkeypatch.context() as patched:
        patched.setattr(memsaver.simulator, "empty", refuse)
        with pytest.warns(memsaver.MemsaverWarning, match="CUDA out of memory"):
            trainer.step()
    expected.step()
    assert trainer.contents() == expected.contents()
    with offloaded.paused():
        assert offloaded.bytes_elsewhere == 0


def test_a_pause_without_host_memory_leaves_all_mapped(sim, tag):
    trainer, expected = Trainer(model=wide_model), Trainer(model=wide_model)
    offloaded = offload(trainer.optimizer, trainer.model, tag=tag())
    step_all(trainer, expected)
    sim.host_limit(0)
    with pytest.raises(memsaver.MemsaverError):
        offloaded.pause()
    assert offloaded.state == "mapped"
    assert trainer.contents() == expected.contents()
    sim.host_limit()
    with offloaded.paused():
        assert sim.tag_bytes() == 0
    assert trainer.contents() == expected.contents()


@pytest.mark.long
def test_interrupted_everywhere(run_python):
    # Either nothing has changed, or the call is complete; repeating the call returns a handle.
    run_python(
        """
    import gc
    import torch
    import memsaver
    from interrupter import Interrupter
    from memsaver.integrations.trainer import collection, offload

    interrupter = Interrupter()
    gc.freeze()  # the simulated driver looks for tensors among all objects
    weight = torch.nn.Parameter(torch.randn(8, 8))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(8, 8)
    optimizer.step()
    states = optimizer.state[weight]
    right = {name: state.clone() for name, state in states.items()}
    handles = []
    for place in interrupter.places(lambda: handles.append(offload(optimizer)), every=29):
        assert all(torch.equal(states[name], right[name]) for name in right), place
        handle = handles.pop() if handles else offload(optimizer)
        with handle.paused():
            pass
        assert all(torch.equal(states[name], right[name]) for name in right), place
        handle.close()
        assert not list(collection._watching), place
        states.update({name: state.clone() for name, state in states.items()})
    assert place > 1000, place
    """,
        timeout=110,
        with_torch=True,
    )


def test_the_waits_for_several_tags_share_a_limit(sim, tag):
    modules = [torch.nn.Linear(4, 4) for _ in range(2)]
    handles = [offload(module, tag=tag(f"part{at}")) for at, module in enumerate(modules)]
    for handle in handles:
        handle.pause()
    with held(sim), limited_waits(0.3):
        arrivals = [handle.resume(wait=False) for handle in handles]
        for module, handle, text in zip(modules, handles, ("", " 0 s,"), strict=True):
            with pytest.raises(memsaver.InvalidStateError, match=f"{text}.*may take 0.3 s") as late:
                module.state_dict()
            assert late.value.tag == handle.tag
    for arrival in arrivals:
        arrival.wait()
    with limited_waits(0):
        assert all(len(module.state_dict()) == 2 for module in modules)
