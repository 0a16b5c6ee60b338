"""Functions that tests run in a fake vLLM's workers through collective_rpc."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

PROMPTS = [[1, 2, 3], [4, 5]]


def connect(worker) -> None:
    """Register the KV cache with a connector for transfers to other engines."""
    from vllm.distributed import kv_transfer

    kv_transfer._AGENT = kv_transfer.Connector()


def is_registered(worker) -> bool:
    """Return whether the KV cache is registered with the connector."""
    from vllm.distributed import kv_transfer

    return kv_transfer.get_kv_transfer_group().is_registered


def occupy(worker, nbytes: int, rank: int = 0) -> None:
    """On one rank, allocate the device's memory as another process would."""
    from memsaver import simulator

    if worker.rank == rank:
        assert simulator.control().sim_occupy(0, nbytes) == 0


def free(worker) -> int:
    """Return the free bytes of the rank's device."""
    import memsaver

    return memsaver.device_memory(0)[0]


def pid(worker) -> int:
    """Return the rank's process id."""
    return os.getpid()


def limit_host(worker, nbytes: int, rank: int = 0) -> None:
    """Limit one rank's host memory for backups."""
    from memsaver import simulator

    if worker.rank == rank:
        simulator.control().sim_host_limit(nbytes)


def break_next(worker, name: str, rank: int = 0) -> None:
    """Make the next call of a method raise on one rank.

    The method belongs to the sleep mode backend, the model runner or the model.
    """
    if worker.rank != rank:
        return
    owners = (worker._get_sleep_mode_backend(), worker.model_runner, worker.model_runner.model)
    owner = next(one for one in owners if hasattr(one, name))

    def broken(*_, **__):
        delattr(owner, name)
        raise ValueError(f"{name} is broken")

    setattr(owner, name, broken)


def constants(worker) -> bytes:
    """Return the contents that the model runner wrote once at startup."""
    return bytes(worker.model_runner.positions)


def resident(worker) -> dict[str, int]:
    """Return the mapped bytes of each tag."""
    import memsaver

    return {row.tag: row.resident_bytes for row in memsaver.stats().tags}


def used(worker) -> int:
    """Return the number of bytes in use on the rank's device."""
    import memsaver

    free, total = memsaver.device_memory(0)
    return total - free


def fail_after_sleep(worker, rank: int) -> None:
    """On one rank, let another process allocate all memory that the next sleep releases."""
    import memsaver
    from memsaver import simulator

    if worker.rank != rank:
        return
    backend = worker._get_sleep_mode_backend()
    suspend = backend.suspend

    def suspend_once(level):
        del backend.suspend
        suspend(level)
        free, _ = memsaver.device_memory(0)
        assert simulator.control().sim_occupy(0, free) == 0

    backend.suspend = suspend_once


def restored(worker) -> int:
    """Return the number of bytes that wake-ups have copied to the weights so far."""
    import memsaver

    return sum(row.restored_bytes for row in memsaver.stats().tags if row.tag == "weights")


def add_draft(worker) -> None:
    """Add a draft model that has no weights of its own."""
    worker.worker.get_draft_model = lambda: SimpleNamespace(named_buffers=list)


def load(worker, seed: int) -> None:
    """Load a checkpoint's weights into a tiny model."""
    from vllm.model_executor.models.tiny import checkpoint

    worker.model_runner.get_model().load_weights(checkpoint(seed).items())


def holds(worker, seed: int, converts: bool = False) -> bool:
    """Return whether a rank's tiny model contains the rank's part of a checkpoint's weights."""
    import torch
    from vllm.model_executor.models.tiny import Tiny, checkpoint

    like = Tiny(worker.rank, worker.parallel_config.world_size, converts)
    like.load_weights(checkpoint(seed).items())
    if converts:
        for layer in like.modules():
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)
    mine = dict(worker.model_runner.get_model().named_parameters())
    return all(torch.equal(mine[name], tensor) for name, tensor in like.named_parameters())


def hurt_next_bucket(worker, rank: int) -> None:
    """Corrupt the next bucket on one rank."""
    from memsaver.integrations.vllm import weight_loads

    if worker.rank != rank:
        return
    arrived = weight_loads._arrived

    def hurt(*arguments):
        weight_loads._arrived = arrived
        named = arrived(*arguments)
        return [(name, tensor + 1) for name, tensor in named]

    weight_loads._arrived = hurt


def join_world(store: str, rank: int, results, first: int) -> None:
    """Join a world of four ranks and report the values that the second executor's ranks gather.

    `first` is the second executor's first rank in vLLM's numbering of the workers.
    """
    import torch.distributed as dist
    from vllm.distributed import parallel_state

    from memsaver.integrations.vllm.executor_ranks import group_of

    parallel_state.init_distributed_environment(4, rank, store)
    seen = None
    if rank >= 2:
        numbered = rank - 2 + first
        worker = SimpleNamespace(rank=numbered, parallel_config=SimpleNamespace(world_size=2))
        seen = [
            fields["rank"] for fields in group_of(worker).gather({"rank": group_of(worker).rank})
        ]
    results.put((rank, seen))
    dist.barrier()
    dist.destroy_process_group()


def generate_without_memory(store: str, rank: int, results, both_failed) -> None:
    """Run a rank of an `LLM` with one process per rank.

    The second rank is late and out of memory.
    """
    from vllm import LLM

    from memsaver.integrations.engine.errors import EngineAsleepError

    os.environ.update(RANK=str(rank), VLLM_FAKE_STORE=store)
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    llm = LLM(enable_sleep_mode=True, **options)
    llm.sleep()
    nbytes = llm.collective_rpc(free)[0] - (1 << 20)
    llm.collective_rpc(occupy, args=(nbytes, 1))
    time.sleep(rank)
    try:
        found = str(llm.generate(PROMPTS))
    except EngineAsleepError as error:
        found = str(error)
    results.put((rank, found))
    assert both_failed.wait(30)
    llm.collective_rpc(occupy, args=(0, 1))
    results.put((rank, len(llm.generate(PROMPTS))))  # which wakes the engine
    llm.shutdown()
