"""Tests `offload` on real GPUs. Each case runs in a separate process:

python tests/gpu/support/offload_cases.py case_peak_of_the_move
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from expected_errors import raises

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

from trainers import (
    OPTIMIZERS,
    Trainer,
    addresses_of,
    lies_in,
    states_of,
    step_all,
    zero_grad_all,
)

import memsaver
import memsaver.distributed as md
from memsaver.integrations.trainer import offload

MIB = 1 << 20
GIB = 1 << 30
PINNING = 32 * MIB  # device memory that the driver uses for 8 GiB of pinned host memory

OPTIMIZERS["adamw_capturable"] = lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True)
OPTIMIZERS["adamw_fused_capturable"] = lambda p: torch.optim.AdamW(
    p, lr=1e-2, fused=True, capturable=True
)


def free() -> int:
    return memsaver.device_memory(torch.cuda.current_device())[0]


def wide_model() -> torch.nn.Module:
    """Return a model with two layers, each of which has 64 MiB of weights."""
    return torch.nn.Sequential(
        torch.nn.Linear(32, 4096), torch.nn.Linear(4096, 4096), torch.nn.Linear(4096, 4096)
    )


def compare(
    optimizer: str,
    model: Callable[[], torch.nn.Module] | None,
    tags: tuple[str, str],
    pause: Callable[[], None],
    steps: int = 20,
    accumulate: bool = False,
) -> Trainer:
    """Check that steps with and without pauses are bit-identical; return the paused trainer."""
    trainer = Trainer(optimizer, model, "cuda", accumulate=accumulate)
    expected = Trainer(optimizer, model, "cuda", accumulate=accumulate)
    offload(trainer.optimizer, tag=tags[0])
    offload(trainer.model, tag=tags[1])
    for step in range(steps):
        expected.step()
        trainer.step(pause if step % 4 == 1 else lambda: None)
        if step % 3 == 0:
            pause()
        assert trainer.contents() == expected.contents(), (optimizer, step)
    for state in states_of(trainer.optimizer):
        # LBFGS replaces states in a step; the next pause moves the new ones.
        assert not state.is_cuda or optimizer == "lbfgs" or lies_in(state, tags[0])
    return trainer


def case_steps_are_bit_equal() -> None:
    for number, name in enumerate(OPTIMIZERS):
        tags = f"optimizer {number}", f"model {number}"

        def pause(tags: tuple[str, str] = tags) -> None:
            with memsaver.paused(*tags):
                rows = [row for row in memsaver.stats().tags if row.tag in tags]
                assert sum(row.resident_bytes for row in rows) == 0

        compare(name, None, tags, pause, accumulate=bool(number % 2))


def case_a_pause_gives_the_memory_back() -> None:
    trainer = Trainer("adamw_fused", wide_model, "cuda")
    offloaded = offload(trainer.optimizer, trainer.model, tag="trainer")
    trainer.step()
    trainer.step()
    torch.cuda.empty_cache()
    addresses, contents = addresses_of(trainer), trainer.contents()
    gradients = sum(p.grad.nbytes for p in trainer.model.parameters())
    assert offloaded.bytes_elsewhere == gradients
    before = free()
    with offloaded.paused():
        assert offloaded.bytes_elsewhere == 0
        assert free() - before >= 0.95 * offloaded.bytes
        assert offloaded.bytes >= 4 * 128 * MIB
        with raises(memsaver.InvalidStateError) as caught:
            trainer.optimizer.step()
        assert caught[0].tag == "trainer"
        with raises(memsaver.InvalidStateError):
            trainer.model(torch.ones(1, 32, device="cuda"))
    assert addresses_of(trainer) == addresses
    assert trainer.contents() == contents
    torch.cuda.synchronize()  # no illegal access


def case_whatever_shares_a_storage_goes_along() -> None:
    # An autograd graph owns views of the weights that have no Python objects.
    trainer = Trainer("sgd_momentum", wide_model, "cuda")
    expected = Trainer("sgd_momentum", wide_model, "cuda")
    x = torch.ones(4, 32, device="cuda")
    loss, other = trainer.model(x).square().mean(), expected.model(x).square().mean()
    flat = trainer.model[1].weight.detach().view(-1)
    offloaded = offload(trainer.model, trainer.optimizer, tag="trainer")
    assert lies_in(flat, "trainer")
    with offloaded.paused():
        pass
    loss.backward()
    other.backward()
    for one in (trainer, expected):
        one.optimizer.step()
    assert trainer.contents() == expected.contents()
    assert torch.equal(flat, trainer.model[1].weight.view(-1))


def case_copies_wait_for_other_streams() -> None:
    tensor = torch.zeros(64 << 20, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        tensor.fill_(5)
    offload(tensor, tag="trainer")
    assert bool((tensor == 5).all())


def case_a_move_waits_for_its_copies() -> None:
    cached = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    del cached
    tensor = torch.full((3 * GIB // 4,), 5.0, device="cuda")
    # Keeps torch from releasing the old memory.
    beside = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    offload(tensor, tag="trainer")
    assert torch.cuda.current_stream().query()
    with torch.cuda.stream(torch.cuda.Stream()):  # which does not wait for other streams
        assert bool((tensor == 5).all())
    del beside


def case_peak_of_the_move() -> None:
    # Eight storages of 1 GiB and many small ones, with room for little more than 1 GiB.
    tensors = [torch.full((GIB // 4,), float(n), device="cuda") for n in range(8)]
    tensors += [torch.full((16 << 10,), float(n), device="cuda") for n in range(1000)]
    nbytes = sum(tensor.nbytes for tensor in tensors)
    filler = torch.empty(free() - 3 * GIB // 2, dtype=torch.uint8, device="cuda")
    offloaded = offload(tensors[::-1], tag="trainer")
    assert offloaded.bytes == nbytes
    before = free()
    with offloaded.paused():
        assert free() - before >= nbytes - PINNING
    for numbers in (tensors[:8], tensors[8:]):
        assert all(bool((tensor == n).all()) for n, tensor in enumerate(numbers))
    del filler


def case_dropped_gradients_go_back() -> None:
    trainer = Trainer("adamw_fused", wide_model, "cuda")
    offloaded = offload(trainer.optimizer, tag="optimizer")
    trainer.step()

    def held() -> int:
        with offloaded.paused():
            pass
        return memsaver.stats()["optimizer"][0].allocated_bytes

    with_gradients = held()
    trainer.optimizer.zero_grad()
    assert with_gradients - held() >= 2 * 64 * MIB


def case_a_step_without_its_parameters_or_gradients_is_refused() -> None:
    trainer = Trainer("adamw_fused", device="cuda")
    states = offload(trainer.optimizer, tag="optimizer", gradients=False)
    trainer.step()
    gradients = [p.grad for p in trainer.model.parameters()]
    others = (offload(trainer.model, tag="model", gradients=False), offload(gradients, tag="grads"))
    contents = trainer.contents()
    for other in others:
        with other.paused():
            assert states.state == "mapped"
            with raises(memsaver.InvalidStateError) as caught:
                trainer.optimizer.step()
            assert caught[0].tag == other.tag
    assert trainer.contents() == contents
    trainer.optimizer.step()


def case_states_that_alias_a_parameter_stay_with_it() -> None:
    trainer = Trainer("adamw_fused", device="cuda")
    for parameter in trainer.model.parameters():
        trainer.optimizer.state[parameter]["master"] = parameter.detach().float()
    x = torch.ones(1, 32, device="cuda")
    expected = trainer.model(x).detach()
    states = offload(trainer.optimizer, tag="optimizer")
    with states.paused():
        assert torch.equal(trainer.model(x), expected)
    weights = offload(trainer.model, tag="model")
    masters = [state["master"] for state in trainer.optimizer.state.values()]
    assert all(lies_in(master, "model") for master in masters)
    with weights.paused(), states.paused():
        assert memsaver.stats().resident_bytes == 0
    assert torch.equal(trainer.model(x), expected)


def case_inside_regions_and_pools() -> None:
    trainer = Trainer("adamw", wide_model, "cuda")
    trainer.step()
    contents = trainer.contents()
    with memsaver.region("other"):
        offload(trainer.optimizer, tag="optimizer")
    moments = [state for state in states_of(trainer.optimizer) if state.is_cuda]
    assert moments
    assert all(lies_in(moment, "optimizer") for moment in moments)
    assert trainer.contents() == contents

    # torch decides which pool it uses: the move succeeds, or is rejected before it begins.
    pool = torch.cuda.MemPool()
    tensor = torch.full((MIB,), 5.0, device="cuda")
    address = tensor.data_ptr()
    with torch.cuda.use_mem_pool(pool):
        try:
            offload(tensor, tag="tensor")
        except memsaver.InvalidStateError as error:
            assert "use_mem_pool" in str(error)
            assert tensor.data_ptr() == address
    offloaded = offload(tensor, tag="tensor")
    assert lies_in(tensor, "tensor")
    with offloaded.paused():
        pass
    assert bool((tensor == 5).all())


def case_memory_that_must_stay_is_refused() -> None:
    class Foreign:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = torch.ones(MIB, device="cuda")
    owner = torch.ones(MIB, device="cuda")
    foreign = torch.as_tensor(Foreign(owner), device="cuda")
    assert foreign.data_ptr() == owner.data_ptr()
    movable = torch.ones(MIB, device="cuda")
    address = movable.data_ptr()
    for tensor, reason in ((pooled, "private memory pool"), (foreign, "not torch's")):
        with raises(memsaver.ConfigError) as caught:
            offload(movable, tensor, tag="trainer")
        assert reason in str(caught[0])
    assert movable.data_ptr() == address
    with raises(memsaver.UnknownTagError):
        memsaver.state("trainer")


def case_without_room() -> None:
    trainer = Trainer("adamw", wide_model, "cuda")
    expected = Trainer("adamw", wide_model, "cuda")
    offloaded = offload(trainer.optimizer, tag="optimizer")
    step_all(trainer, expected)

    # Without room to move gradients, the pause fails; without gradients, it succeeds.
    torch.cuda.empty_cache()
    filler = torch.empty(free() - 32 * MIB, dtype=torch.uint8, device="cuda")
    with raises(memsaver.OutOfDeviceMemoryError):
        offloaded.pause()
    assert offloaded.state == "mapped"
    assert trainer.contents() == expected.contents()
    zero_grad_all(trainer, expected)
    with offloaded.paused():
        pass
    del filler

    torch.cuda.empty_cache()
    step_all(trainer, expected)
    offloaded.pause()
    torch.cuda.empty_cache()
    with memsaver.disabled():
        filler = torch.empty(free() - 128 * MIB, dtype=torch.uint8, device="cuda")
    with raises(memsaver.OutOfDeviceMemoryError) as caught:
        offloaded.resume()
    assert caught[0].needed > caught[0].free
    assert offloaded.state == "paused"
    with raises(memsaver.InvalidStateError):
        trainer.optimizer.step()
    del filler
    torch.cuda.empty_cache()
    offloaded.resume()
    step_all(trainer, expected)
    assert trainer.contents() == expected.contents()

    # The new gradients are moved to the places of the deleted ones, so no free memory is needed.
    torch.cuda.empty_cache()
    filler = torch.empty(free() - 32 * MIB, dtype=torch.uint8, device="cuda")
    with offloaded.paused():
        pass
    assert trainer.contents() == expected.contents()
    del filler


def case_on_the_second_gpu() -> None:
    trainer, expected = Trainer(device="cuda:1"), Trainer(device="cuda:1")
    offloaded = offload(trainer.model, trainer.optimizer, tag="trainer")
    assert torch.cuda.current_device() == 0
    for _ in range(3):
        trainer.step()
        expected.step()
        with offloaded.paused():
            assert all(lies_in(parameter, "trainer") for parameter in trainer.model.parameters())
            rows = memsaver.stats()["trainer"]
            assert sum(row.resident_bytes for row in rows) == 0
        assert trainer.contents() == expected.contents()
    assert {row.device for row in rows if row.allocated_bytes} == {1}


def case_fsdp2() -> None:
    """Pauses do not change the results of FSDP2's steps.

    Every rank of the process group runs this case.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    mesh = init_device_mesh("cuda", (size,))

    def model(reshard: bool, mixed: bool) -> torch.nn.Module:
        layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4))).cuda()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if mixed else None)
        for layer in (*layers, layers):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        return layers

    for number, (name, reshard, mixed, accumulate) in enumerate(
        [
            ("adamw_fused", True, True, False),
            ("adamw_foreach", True, False, True),
            ("sgd_momentum", False, True, True),
        ]
    ):
        tags = f"optimizer {number}", f"model {number}"

        def pause(tags: tuple[str, str] = tags) -> None:
            with md.paused(*tags):
                rows = [row for row in memsaver.stats().tags if row.tag in tags]
                assert sum(row.resident_bytes for row in rows) == 0

        trainer = compare(name, partial(model, reshard, mixed), tags, pause, accumulate=accumulate)
        with torch.no_grad():  # leaves full parameters, which are neither kept nor moved
            trainer.model(torch.ones(1, 32, device="cuda"))
        pause()
        assert all(lies_in(p, tags[1]) for p in trainer.model.parameters())
        md.pause(*tags)
        for work in (
            trainer.optimizer.step,
            lambda model=trainer.model: model(torch.ones(1, 32, device="cuda")),
        ):
            with raises(memsaver.InvalidStateError):
                work()
        md.resume(*tags)
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] != "case_without_room":  # warns that torch's allocation failed
        warnings.simplefilter("error", memsaver.MemsaverWarning)
    globals()[sys.argv[1]]()
    torch.cuda.synchronize()
    print("held", flush=True)
