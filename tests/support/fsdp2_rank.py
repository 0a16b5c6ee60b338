"""One rank of FSDP2 trainers with tags, on gloo; `rank_processes` runs `main`."""

from unittest import mock

import torch
import torch.distributed as dist
from looks import held, released_soon
from refusals import refused
from simulated_driver import Simulator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainers import Trainer, lies_in, plain_model, step_all

import memsaver
from memsaver.integrations.trainer import guards, offload

sim = Simulator()


def sharded(mesh, reshard):
    def make():
        model = plain_model()
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)

    return make


def addresses_of_shards(model):
    return [parameter.to_local().data_ptr() for parameter in model.parameters()]


def train(optimizer, model, accumulate, tags):
    """Check that training steps with and without pauses are bit-identical."""
    trainer = Trainer(optimizer, model, accumulate=accumulate)
    expected = Trainer(optimizer, model, accumulate=accumulate)
    offload(trainer.optimizer, tag=tags[0])
    weights = offload(trainer.model, tag=tags[1])

    def pause():
        with memsaver.paused(*tags):
            rows = memsaver.stats().tags
            assert sim.tag_bytes() == sum(row.resident_bytes for row in rows)
            assert not any(row.resident_bytes for row in rows if row.tag in tags)

    pause()
    for step in range(8):
        expected.step()
        trainer.step(pause if step % 2 else lambda: None)
        if step == 4:
            addresses = addresses_of_shards(trainer.model)
        if step % 3 == 0:
            pause()
        assert trainer.contents() == expected.contents(), (optimizer, step)
    assert addresses == addresses_of_shards(trainer.model)
    for parameter in trainer.model.parameters():
        assert lies_in(parameter, tags[1])
        for name, value in trainer.optimizer.state[parameter].items():
            assert name == "step" or lies_in(value, tags[0])
    # A forward alone leaves full parameters behind; they are neither kept nor moved.
    held = weights.bytes
    for one in (trainer, expected):
        one.optimizer.zero_grad()
        with torch.no_grad():
            one.model(torch.ones(1, 32))
    pause()
    assert weights.bytes == held
    assert all(lies_in(parameter, tags[1]) for parameter in trainer.model.parameters())
    step_all(trainer, expected)
    assert trainer.contents() == expected.contents(), optimizer
    memsaver.pause(*tags)
    for work in (trainer.optimizer.step, lambda: trainer.model(torch.ones(1, 32))):
        assert refused(memsaver.InvalidStateError, work).tag in tags
    memsaver.resume(*tags)


def wait_for_event(model, tag):
    """Check that the host waits for a resume if FSDP2 waits only for the program's event.

    As on a GPU, only the current stream waits for the copies in `order_after_arrival`.
    """
    handle = offload(model, tag=tag)
    handle.pause()
    model.set_post_optim_event(torch.cpu.Event())
    with mock.patch.object(guards, "order_after_arrival", return_value=True), held(sim):
        arrival = handle.resume(wait=False)
        with released_soon(sim):
            model(torch.ones(1, 32))
            assert arrival.done()
    arrival.wait()


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sim.start()
    for number, (optimizer, reshard, accumulate) in enumerate(
        [("adamw", True, False), ("adam_amsgrad", False, True), ("sgd_momentum", False, False)]
    ):
        tags = f"optimizer {number}", f"model {number}"
        train(optimizer, sharded(mesh, reshard), accumulate, tags)
    wait_for_event(sharded(mesh, True)(), "with an event")
    dist.destroy_process_group()
