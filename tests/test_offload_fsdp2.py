"""FSDP2 trainers in tags, on one rank and on two that share nothing but gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from child_process import environment_without

pytest.importorskip("torch")

RANK = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import memsaver
from memsaver.integrations.trainer import offload
from simulated_driver import Simulator
from trainers import Trainer, lies_in, plain_model

path, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)
mesh = init_device_mesh("cpu", (size,))
sim = Simulator()
sim.start()


def sharded(reshard):
    def make():
        model = plain_model()
        for layer in (model[0], model[3]):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        return fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return make


for number, (optimizer, reshard, accumulate) in enumerate(
    [("adamw", True, False), ("adam_amsgrad", False, True), ("sgd_momentum", False, False)]
):
    trainer = Trainer(optimizer, sharded(reshard), accumulate=accumulate)
    expected = Trainer(optimizer, sharded(reshard), accumulate=accumulate)
    tags = f"optimizer {number}", f"model {number}"
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
            addresses = [p.to_local().data_ptr() for p in trainer.model.parameters()]
        if step % 3 == 0:
            pause()
        assert trainer.contents() == expected.contents(), (optimizer, step)
    assert addresses == [p.to_local().data_ptr() for p in trainer.model.parameters()]
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
    trainer.step()
    expected.step()
    assert trainer.contents() == expected.contents(), optimizer
    memsaver.pause(*tags)
    for work in (trainer.optimizer.step, lambda: trainer.model(torch.ones(1, 32))):
        try:
            work()
        except memsaver.InvalidStateError as error:
            assert error.tag in tags
        else:
            raise AssertionError("nothing refused it")
    memsaver.resume(*tags)
dist.destroy_process_group()
print("held")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_between_pauses_are_bit_equal(tmp_path, ranks):
    environment = {
        **environment_without("MEMSAVER_"),
        "MEMSAVER_DRIVER": "sim",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "store"), str(rank), str(ranks)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)
    assert all("held" in text for text in said)
