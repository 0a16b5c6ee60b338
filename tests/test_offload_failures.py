"""What fails for want of memory or by the driver, and what holds afterwards."""

import gc

import pytest

import memsaver
from memsaver.integrations.trainer import offload

torch = pytest.importorskip("torch")

from trainers import Trainer, addresses_of  # noqa: E402

MIB = 1 << 20


def wide_model():
    """A model whose first weight has 4 MiB."""
    return torch.nn.Sequential(torch.nn.Linear(32, 32 << 10), torch.nn.Linear(32 << 10, 8))


@pytest.fixture
def leave_free(sim):
    """Leaves so many bytes of the device to the test: `leave_free(nbytes)`."""

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
        trainer.step()
        expected.step()
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
        trainer.step()
        expected.step()
        with offloaded.paused():
            pass
        assert trainer.contents() == expected.contents()


def test_an_offload_without_room_can_be_made_again(sim, tag, leave_free):
    trainer, expected = Trainer(model=wide_model), Trainer(model=wide_model)
    for one in (trainer, expected):
        one.step()
    leave_free(10 * MIB)
    name = tag()
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        offload(trainer.optimizer, tag=name)
    assert trainer.contents() == expected.contents()
    trainer.step()  # usable as it is
    expected.step()
    sim.occupy(0)
    offloaded = offload(trainer.optimizer, tag=name)
    assert trainer.contents() == expected.contents()
    trainer.optimizer.zero_grad()
    expected.optimizer.zero_grad()
    with offloaded.paused():
        assert sim.tag_bytes() == 0
    assert trainer.contents() == expected.contents()


def test_a_pause_without_room_for_gradients_pauses_nothing(sim, tag, leave_free):
    trainer, expected = Trainer(model=wide_model), Trainer(model=wide_model)
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()
    expected.step()
    leave_free(2 * MIB)
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        memsaver.pause(offloaded.tag)
    assert offloaded.state == "mapped"
    assert trainer.contents() == expected.contents()
    trainer.optimizer.zero_grad()
    expected.optimizer.zero_grad()
    with offloaded.paused():  # without them there is enough
        assert memsaver.stats()[offloaded.tag][0].resident_bytes == 0
    assert trainer.contents() == expected.contents()


def test_a_step_whose_states_find_no_room_is_done_and_warns(sim, tag, leave_free):
    trainer, expected = Trainer(model=wide_model), Trainer(model=wide_model)
    offloaded = offload(trainer.optimizer, tag=tag())
    leave_free(2 * MIB)
    with pytest.warns(memsaver.MemsaverWarning, match="the next pause"):
        trainer.step()
    expected.step()
    assert trainer.contents() == expected.contents()
    sim.occupy(0)
    with offloaded.paused():
        assert offloaded.bytes_elsewhere == 0
        assert sim.tag_bytes() == 0
    assert trainer.contents() == expected.contents()


def test_a_pause_without_host_memory_leaves_all_mapped(sim, tag):
    trainer, expected = Trainer(model=wide_model), Trainer(model=wide_model)
    offloaded = offload(trainer.optimizer, trainer.model, tag=tag())
    trainer.step()
    expected.step()
    sim.host_limit(0)
    with pytest.raises(memsaver.MemsaverError):
        offloaded.pause()
    assert offloaded.state == "mapped"
    assert trainer.contents() == expected.contents()
    sim.host_limit()
    with offloaded.paused():
        assert sim.tag_bytes() == 0
    assert trainer.contents() == expected.contents()


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_resume_that_the_driver_refuses_once(sim, tag, call):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.optimizer, trainer.model, tag=tag())
    trainer.step()
    expected.step()
    offloaded.pause()
    with sim.fault(call, sim.OUT_OF_MEMORY), pytest.raises(memsaver.MemsaverError):
        offloaded.resume()
    assert offloaded.state == "paused"
    assert sim.tag_bytes() == 0
    offloaded.resume()
    trainer.step()
    expected.step()
    assert trainer.contents() == expected.contents()


def test_a_dead_trainer_stops_no_pause(sim, tag):
    trainer = Trainer()
    name = tag()
    offload(trainer.optimizer, tag=name)
    trainer.step()
    del trainer
    gc.collect()
    with memsaver.paused(name):
        assert sim.tag_bytes() == 0
