"""Starts vLLM engines for the scenarios and provides the operations that the scenarios need.

The engine runs in a separate process or in this process. This process also acts as the trainer that
uses the released memory. The module requires torch, vLLM and memsaver.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import qwen_model
import torch
import vllm_adapters
from gpu_trainer import GIB, MIB, Trainer

SLACK = 32 * MIB  # torch's own allocations between two readings of free memory
KV_CACHE = 4 * GIB
PROMPTS = ([5, 6, 7, 8, 901, 44], [9, 10, 11], list(range(3000, 3100)))
TOKENS = 24
DRAFTED = 3  # tokens in a step, by a draft model

COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_sleep_mode": True,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": KV_CACHE,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "attention_config": {"backend": "TRITON_ATTN"},
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
    "worker_extension_cls": "vllm_in_worker.Checks",
    "disable_log_stats": True,
    "seed": 1,
}
FP8 = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "engine": {},
    "in_process": {},
    "v1": {},
    "quantized": FP8,
    "quantized_v1": FP8,
    "adapters": {"enable_lora": True, "max_lora_rank": vllm_adapters.RANK, "max_loras": 2},
    "draft": {
        "speculative_config": {
            "method": "draft_model",
            "num_speculative_tokens": DRAFTED,
            "attention_backend": "TRITON_ATTN",
        }
    },
    "ray": {"distributed_executor_backend": "ray"},
    "cycles": {"kv_cache_memory_bytes": 256 * MIB},
    "wake": {},
    "pageable": {},
    "disk": {},
    "peer": {},
    "engine_tp2": {"tensor_parallel_size": 2},
    "graphs_tp2": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
}


@dataclass
class Session:
    """An engine with its configuration and its expected output.

    Attributes:
        group: the name of the configuration.
        llm: the `vllm.LLM`.
        folder: a folder for files.
        ranks: the number of workers.
        gpus: the number of GPUs; less than `ranks` if workers share a GPU.
        before: each GPU's free bytes before the engine's start.
        expected: the tokens that the engine generates after its start.
    """

    group: str
    llm: Any
    folder: Path
    ranks: int
    gpus: int
    before: list[int]
    expected: list[list[int]] = field(default_factory=list)

    def outputs(self, adapter: Any = None) -> list[list[int]]:
        """Return greedy tokens for one prompt at a time, because batches change the arithmetic."""
        found = []
        for prompt in PROMPTS:
            inputs = [{"prompt_token_ids": prompt}]
            done = self.llm.generate(inputs, greedy(TOKENS), use_tqdm=False, lora_request=adapter)
            found.append(list(done[0].outputs[0].token_ids))
        return found

    def free(self) -> list[int]:
        """Return the number of free bytes that the driver reports for each GPU."""
        return free(self.gpus)

    def in_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `vllm_in_worker.Checks` in each worker; return the results."""
        found: list[Any] = self.llm.collective_rpc(method, args=arguments)
        return found

    def is_asleep(self) -> bool:
        return bool(self.llm.llm_engine.is_sleeping())

    def close(self) -> None:
        """End the engine."""
        self.llm.llm_engine.engine_core.shutdown()


def free(gpus: int) -> list[int]:
    readings = []
    for gpu in range(gpus):
        torch.cuda.synchronize(gpu)
        readings.append(torch.cuda.mem_get_info(gpu)[0])
    return readings


def greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=1
    )


def arguments_of(group: str, folder: Path) -> dict[str, Any]:
    model = str(folder / "model")
    made = {"model": model, **COMMON, **ARGUMENTS[group]}
    if "speculative_config" in made:  # the target's own checkpoint, so that drafts are accepted
        made["speculative_config"] = {**made["speculative_config"], "model": model}
    return made


def start(group: str, folder: Path) -> Session:
    """Start the engine for a group of scenarios and record its expected output."""
    qwen_model.save(folder / "model", qwen_model.weights(seed=1))
    arguments = arguments_of(group, folder)
    ranks = arguments.get("tensor_parallel_size", 1)
    gpus = min(ranks, torch.cuda.device_count())
    for gpu in range(gpus):  # creates this process's context, and loads the trainer's kernels
        warm = Trainer(gpu, free(gpus)[gpu] - GIB - SLACK, pattern=1)
        assert warm.is_intact()
        warm.free()
    before = free(gpus)
    from vllm import LLM

    begin = time.perf_counter()
    session = Session(group, LLM(**arguments), folder, ranks, gpus, before)
    print(f"--- the engine is up after {time.perf_counter() - begin:.1f} s", flush=True)
    try:
        _learn(session)
    except BaseException:
        session.close()
        raise
    return session


def _learn(session: Session) -> None:
    """Record the expected output; check that the output is deterministic and not degenerate."""
    readings = [session.outputs() for _ in range(3)]  # the first compiles kernels
    assert readings[1] == readings[2], f"the engine is not deterministic: {readings[1:]}"
    session.expected = readings[2]
    for tokens in session.expected:
        assert len(tokens) == TOKENS and len(set(tokens)) > TOKENS // 4, f"degenerate: {tokens}"
    assert len({tuple(tokens) for tokens in session.expected}) == len(PROMPTS), "no effect"
