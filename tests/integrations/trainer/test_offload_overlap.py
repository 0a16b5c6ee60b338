"""Tests steps whose optimizer states are resumed and paused in the background."""

import copy
import gc
import signal
import warnings

import pytest
import torch
from looks import held, released_soon
from trainers import OPTIMIZERS, Trainer, bytes_of, states_of, step_all, zero_grad_all

import memsaver
from memsaver.integrations.trainer import offload


@pytest.fixture
def make(tag):
    """Create a trainer with states, its handle, and an identical trainer that never pauses."""

    def made(optimizer="adamw", **options):
        trainer, expected = Trainer(optimizer), Trainer(optimizer)
        offloaded = offload(trainer.optimizer, tag=tag(), **options)
        step_all(trainer, expected)
        zero_grad_all(trainer, expected)
        return trainer, expected, offloaded

    return made


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_step_succeeds_if_a_resume_callback_raises(sim, make, error):
    """The optimizer's states are resumed, and `Transition.wait` raises the callback's exception."""
    trainer, expected, offloaded = make()
    offloaded.pause()

    def fails(_):
        raise error("a callback has a bad day")

    registration = memsaver.on_resume(fails, tag=offloaded.tag)
    with held(sim):
        arrival = offloaded.resume(wait=False)
        trainer.model(torch.ones(4, 32)).sum().backward()
        with released_soon(sim):
            trainer.optimizer.step()
    with pytest.raises(error, match="bad day"):
        arrival.wait()
    registration.remove()
    expected.model(torch.ones(4, 32)).sum().backward()
    expected.optimizer.step()
    assert offloaded.state == "mapped" and trainer.contents() == expected.contents()


def test_a_signal_handlers_exception_ends_only_the_wait(sim, make):
    """The next step waits again."""
    trainer, expected, offloaded = make()

    class AlarmError(Exception):
        pass

    def alarm(*_):
        raise AlarmError

    before = signal.signal(signal.SIGALRM, alarm)
    offloaded.pause()
    try:
        with held(sim):
            arrival = offloaded.resume(wait=False)
            trainer.model(torch.ones(4, 32)).sum().backward()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(AlarmError):
                trainer.optimizer.step()
            with released_soon(sim):
                trainer.optimizer.step()
    finally:
        signal.signal(signal.SIGALRM, before)
    arrival.wait()
    expected.model(torch.ones(4, 32)).sum().backward()
    expected.optimizer.step()
    assert trainer.contents() == expected.contents()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_waits_for_states_that_return_in_the_background(sim, make, optimizer):
    trainer, expected, offloaded = make(optimizer)
    for step in range(4):
        offloaded.pause()
        with held(sim):
            arrival = offloaded.resume(wait=False)
            if not isinstance(trainer.optimizer, torch.optim.LBFGS):
                trainer.model(torch.ones(4, 32)).sum().backward()  # needs no states
                trainer.optimizer.zero_grad()
            assert not arrival.done() and offloaded.state == "restoring"
            with released_soon(sim):
                trainer.step()
        assert arrival.wait().changed == (offloaded.tag,)
        expected.step()
        zero_grad_all(trainer, expected)
        assert trainer.contents() == expected.contents(), step


USES = {
    "load_state_dict": lambda trainer, saved: trainer.optimizer.load_state_dict(saved),
    "state_dict": lambda trainer, saved: trainer.optimizer.state_dict(),
    "another optimizer's step": lambda trainer, saved: torch.optim.SGD(
        [state["exp_avg"] for state in trainer.optimizer.state.values()], lr=0.0
    ).step(),
}


@pytest.mark.parametrize("use", USES)
def test_other_hooked_calls_wait_too(sim, make, use):
    trainer, _, offloaded = make()
    saved = copy.deepcopy(trainer.optimizer.state_dict())
    before = [bytes_of(tensor) for tensor in states_of(trainer.optimizer)]
    offloaded.pause()
    with held(sim):
        offloaded.resume(wait=False)
        with released_soon(sim):
            USES[use](trainer, saved)
    assert [bytes_of(tensor) for tensor in states_of(trainer.optimizer)] == before


def test_new_states_of_a_step_wait_for_the_old_ones(sim, make):
    trainer, expected, offloaded = make()
    for one in (trainer, expected):
        extra = torch.nn.Parameter(torch.ones(64))
        extra.grad = torch.ones(64)
        one.optimizer.add_param_group({"params": [extra]})
    offloaded.pause()
    arrival = offloaded.resume(wait=False)
    step_all(trainer, expected)
    arrival.wait()
    zero_grad_all(trainer, expected)
    assert trainer.contents() == expected.contents()
    assert offloaded.bytes_elsewhere == 0


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemcpyHtoDAsync"])
def test_the_step_raises_the_error_of_a_failed_resume_and_nothing_is_lost(sim, make, call):
    trainer, expected, offloaded = make()
    before = trainer.contents()
    offloaded.pause()
    trainer.backward()
    with sim.fault(call, sim.OUT_OF_MEMORY):
        arrival = offloaded.resume(wait=False)
        with pytest.raises(memsaver.OutOfDeviceMemoryError) as caught:
            trainer.optimizer.step()
        assert caught.value.tag == offloaded.tag
    assert arrival.done() and offloaded.state == "paused"
    with pytest.raises(memsaver.InvalidStateError, match=r"paused: memsaver\.resume"):
        trainer.optimizer.step()  # the resume's own error is raised once
    offloaded.resume()
    trainer.optimizer.zero_grad()
    assert trainer.contents() == before
    step_all(trainer, expected)
    zero_grad_all(trainer, expected)
    assert trainer.contents() == expected.contents()


def test_an_old_failure_is_not_the_error_of_a_later_pause(sim, make):
    trainer, _, offloaded = make()
    offloaded.pause()
    with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
        with pytest.raises(memsaver.OutOfDeviceMemoryError):
            offloaded.resume(wait=False).wait()
    for resume in (offloaded.resume, lambda: memsaver.resume(offloaded.tag)):
        resume()
        offloaded.pause()
        with pytest.raises(memsaver.InvalidStateError, match=r"paused: memsaver\.resume"):
            trainer.optimizer.step()
    offloaded.resume()


def test_a_failure_that_no_step_has_noticed_is_a_warning(sim, make):
    trainer, _, offloaded = make()
    offloaded.pause()
    with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
        arrival = offloaded.resume(wait=False)
        while not arrival.done():
            pass
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del arrival
        offloaded.resume()
        gc.collect()
    assert [w.category for w in caught] == [memsaver.MemsaverWarning]
    trainer.step()


def test_a_pause_in_the_background_rejects_steps_until_the_resume(sim, make):
    trainer, expected, offloaded = make()
    trainer.backward()
    with held(sim):
        going = offloaded.pause(wait=False)
        assert offloaded.state == "saving"
        with pytest.raises(memsaver.InvalidStateError, match="wait for the transition"):
            trainer.optimizer.step()
        trainer.model(torch.ones(4, 32))
    assert going.wait().changed == (offloaded.tag,)
    offloaded.resume()
    trainer.optimizer.zero_grad()
    assert trainer.contents() == expected.contents()


def test_a_pause_waits_for_a_resume_in_the_background(sim, make):
    trainer, expected, offloaded = make()
    for _ in range(3):
        offloaded.pause()
        arrival = offloaded.resume(wait=False)
        offloaded.pause()
        assert arrival.done() and offloaded.state == "paused"
    offloaded.resume()
    assert trainer.contents() == expected.contents()


def test_only_states_may_return_during_other_work(sim, make, tag):
    trainer, _, offloaded = make()
    assert offloaded.may_overlap
    trainer.backward()
    assert offloaded.may_overlap  # these gradients are not in the tag
    with offloaded.paused():
        assert not offloaded.may_overlap  # now they are
    trainer.optimizer.zero_grad()
    assert offloaded.may_overlap
    assert not offload(trainer.model, tag=tag()).may_overlap
    assert not make(parameters=True)[2].may_overlap


@pytest.mark.each_python
def test_a_step_on_its_way_when_the_program_ends_or_is_interrupted(run_python):
    run_python(
        """
        import signal, threading
        import memsaver
        from memsaver.integrations.trainer import offload
        from simulated_driver import Simulator
        from trainers import Trainer

        sim = Simulator()
        trainer, expected = Trainer(), Trainer()
        offloaded = offload(trainer.optimizer)
        trainer.step(), expected.step()
        trainer.optimizer.zero_grad()
        offloaded.pause()
        sim.hold_streams(True)
        arrival = offloaded.resume(wait=False)
        trainer.backward()
        main = threading.main_thread().ident
        threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        try:
            trainer.optimizer.step()
            raise AssertionError("the step did not wait")
        except KeyboardInterrupt:
            assert not arrival.done() and offloaded.state == "restoring"
        sim.hold_streams(False)
        trainer.step(), expected.step()
        assert trainer.contents() == expected.contents()
        trainer.optimizer.zero_grad()
        offloaded.pause()
        sim.stream_delay(0.2)
        offloaded.resume(wait=False)  # the end of the program waits for it
        """,
        with_torch=True,
    )


def test_a_part_of_a_model_with_two_handles_loads_while_the_model_returns(sim, tag):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    name = tag()
    offloaded, other = offload(model, tag=name), offload(model, tag=name)
    saved = {key: torch.full_like(value, 3) for key, value in model[0].state_dict().items()}
    offloaded.pause()
    with held(sim):
        arrival = offloaded.resume(wait=False)
        with released_soon(sim):
            model[0].load_state_dict(saved)
    arrival.wait()
    assert torch.equal(model[0].weight, saved["weight"])
    other.close()
    offloaded.close()
