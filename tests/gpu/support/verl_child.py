"""Generates on verl's sleeping SGLang server under each policy; exits with status 0 on success.

usage: verl_child.py GPUS FOLDER

The server is an instance of verl's class in this process. In verl, the trainer runs the server in a
Ray actor. The calls are the same as those of verl's trainer and agents.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import sys
from pathlib import Path
from typing import Any

from expected_errors import raises
from rollout_child import GIB, PROMPTS, STUCK_SECONDS, TOKENS

WAIT_SECONDS = 20


async def started(folder: Path, gpus: int) -> Any:
    """Start verl's server with a small model, in the mode for a server that shares its GPUs."""
    import qwen_model
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

    qwen_model.save(folder / "model", qwen_model.weights(seed=1))
    options = {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "cuda_graph_bs_decode": [1, 2],
        "disable_prefill_cuda_graph": True,
        "random_seed": 1,
    }
    server = SGLangHttpServer(
        config=RolloutConfig(
            name="sglang",
            tensor_model_parallel_size=gpus,
            gpu_memory_utilization=0.3,
            load_format="auto",
            max_num_seqs=8,
            engine_kwargs={"sglang": options},
        ),
        model_config=HFModelConfig(
            path=str(folder / "model"),
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
        ),
        rollout_mode=RolloutMode.COLOCATED,
        workers=[],
        replica_rank=0,
        node_rank=0,
        nnodes=1,
        cuda_visible_devices=",".join(map(str, range(gpus))),
        base_gpu_id=0,
    )
    await server.launch_server()
    return server


async def scene(folder: Path, gpus: int) -> None:
    """Check that generations are refused, held and answered while the server sleeps."""
    import torch

    from memsaver.integrations.engine.errors import EngineAsleepError
    from memsaver.integrations.engine.policies import Policy
    from memsaver.integrations.sglang.admissions import admission_of

    server = await started(folder, gpus)
    admission = admission_of(server.tokenizer_manager)
    assert admission is not None
    numbers = iter(range(100))

    async def generated() -> list[int]:
        sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        output = await server.generate(PROMPTS[0], sampling, f"request {next(numbers)}")
        return list(output.token_ids)

    def free() -> list[int]:
        return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(gpus)]

    async def sleep() -> None:
        awake = free()
        await server.sleep()
        gained = [now - then for now, then in zip(free(), awake, strict=True)]
        assert min(gained) > GIB, gained

    found = []
    for _ in range(3):  # the first compiles kernels
        found.append(await generated())
        await server.clear_kv_cache()  # a cached prefix changes the arithmetic
    expected = found[2]
    assert found[1] == expected and len(expected) == TOKENS, found
    assert len(set(expected)) > TOKENS // 4, f"degenerate: {expected}"

    await sleep()
    admission.policy = Policy("refuse")
    with raises(EngineAsleepError) as caught:
        await generated()
    assert set(caught[0].tags) == {"kv_cache", "weights"}, caught[0]
    await server.wake_up()
    assert await generated() == expected

    await sleep()
    admission.policy = Policy("wait", WAIT_SECONDS)
    held = asyncio.ensure_future(generated())
    await asyncio.sleep(2)
    assert not held.done() and admission.waiting == 1
    await server.wake_up()
    assert await asyncio.wait_for(held, WAIT_SECONDS) == expected

    await server.clear_kv_cache()
    await sleep()
    admission.policy = Policy("wake", WAIT_SECONDS)
    assert await generated() == expected
    assert not admission.released


if __name__ == "__main__":
    from sglang_child import check_installation

    check_installation()
    faulthandler.dump_traceback_later(STUCK_SECONDS)
    asyncio.run(scene(Path(sys.argv[2]), int(sys.argv[1])))
    print("held", flush=True)
    os._exit(0)  # the server has no call that ends it; the test ends its processes
