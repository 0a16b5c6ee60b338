"""Run a vLLM engine in a separate process, with memsaver or with vLLM's own allocator.

vLLM itself finds memsaver's plugin; MEMSAVER_VLLM=0 turns the plugin off. Each start checks that
the engine uses the named allocator.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import engine_process as processes
from children import Child
from engine_process import inherited_without, used_mib
from libraries import OURS
from serve import Worker

BENCH = "vllm_cycle"
THEIRS = "vllm"
PEER = "vLLM's own allocator"
WEIGHTS, KV_CACHE = "weights", "kv_cache"
REQUESTS, PROMPT, TOKENS = 8, 64, 256

# Prefixes of the settings that the benchmark sets itself.
DROPPED = (
    "LD_PRELOAD",
    "MEMSAVER_",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "VLLM_PLUGINS",
)

DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its kernels are not needed
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def environment(name: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of an engine with the named allocator."""
    found = DEFAULTS | inherited_without(DROPPED, inherited)
    found["MEMSAVER_VLLM"] = "1" if name == OURS else "0"
    return found


def prefix(options: argparse.Namespace) -> str:
    """Return the metrics' prefix, which depends on the number of GPUs."""
    return "vllm_" if options.gpus == 1 else f"vllm_tp{options.gpus}_"


def engine_process(name: str, options: argparse.Namespace, fraction: float) -> Child:
    """Start a process that imports vLLM; see `engine_process.process`."""
    return processes.process(
        f"{__name__}:EngineWorker",
        name,
        environment(name),
        options,
        fraction=fraction,
        gpus=options.gpus,
        attention=options.attention,
    )


class EngineWorker(Worker):
    """A worker that starts the engine and calls it for all measurements.

    Args:
        name: either OURS or THEIRS.
        model: the model's directory.
        small: whether the model is the small one.
        wait: the seconds to wait while the driver clears released memory.
        device: the device, which is "cpu" for a fake engine.
        fraction: gpu_memory_utilization.
        gpus: the number of GPUs, for tensor parallelism.
        attention: the attention backend.
    """

    imports: ClassVar[tuple[str, ...]] = ("torch", "vllm")

    def __init__(
        self,
        name: str,
        model: str,
        small: bool,
        wait: float,
        device: str,
        fraction: float,
        gpus: int,
        attention: str,
    ) -> None:
        del small, device
        self._name, self._model, self._wait = name, model, wait
        self._fraction, self._gpus, self._attention = fraction, gpus, attention

    def start(self) -> dict[str, Any]:
        """Start the engine, check its allocator, and load random weights."""
        import vllm

        begin = time.perf_counter()
        self.engine = vllm.LLM(
            model=self._model,
            load_format="dummy",
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            gpu_memory_utilization=self._fraction,
            tensor_parallel_size=self._gpus,
            max_model_len=2048,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=False,
            attention_config={"backend": self._attention},
            compilation_config={
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
            },
            worker_extension_cls="vllm_worker_calls.WorkerCalls",
            disable_log_stats=True,
            seed=1,
        )
        seconds = round(time.perf_counter() - begin, 3)
        self._check_allocator()
        self.engine.collective_rpc("bench_randomize", args=(1,))
        self.generate(16)
        return {"seconds": seconds, "used": self._used()}

    def stop(self) -> dict[str, Any]:
        """Shut the engine down."""
        self.engine.llm_engine.engine_core.shutdown()
        return {}

    def generate(self, tokens: int, at_once: int = REQUESTS) -> list[list[int]]:
        """Return `tokens` greedy tokens for each of REQUESTS prompts, in batches of `at_once`."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=1
        )
        starts = [10 + number * PROMPT for number in range(REQUESTS)]
        prompts = [{"prompt_token_ids": list(range(at, at + PROMPT))} for at in starts]
        return [
            list(one.outputs[0].token_ids)
            for at in range(0, REQUESTS, at_once)
            for one in self.engine.generate(prompts[at : at + at_once], greedy, use_tqdm=False)
        ]

    def _state(self) -> tuple[list[str], list[list[int]]]:
        """Return checksums of the weights, and the output of the prompts, run one at a time.

        The prompts are not batched, because a batch might be scheduled differently each time, which
        changes the arithmetic.
        """
        return self._checksums(), self.generate(TOKENS // 8, at_once=1)

    def decode(self, times: int) -> dict[str, Any]:
        """Return the tokens per second of `times` batches, after one batch that is not included."""
        rates = []
        for _ in range(times + 1):
            begin = time.perf_counter()
            tokens = sum(map(len, self.generate(TOKENS)))
            rates.append(round(tokens / (time.perf_counter() - begin), 2))
        return {"tokens_per_s": rates[1:]}

    def cycle(self, change: bool) -> dict[str, Any]:
        """Sleep at level 1, then wake weights and KV cache; if `change`, first change the weights.

        Returns the duration of each step in milliseconds, measured by the caller, and the memory in
        use, in MiB, while the engine sleeps. In the result, "lost" reports a change of the weights
        or of the output.
        """
        if change:
            old = self._checksums()
            self.engine.collective_rpc("bench_change")
            if old == self._checksums():
                raise RuntimeError("the weights were not changed")
        before = self._state()
        if len({tuple(tokens) for tokens in before[1]}) < REQUESTS // 2:
            raise RuntimeError(f"the prompts have no effect on the output: {before[1]}")
        found = {"sleep": self._ms(lambda: self.engine.sleep(level=1))}
        time.sleep(self._wait)
        found["resident"] = self._used()
        found["wake_weights"] = self._ms(lambda: self.engine.wake_up(tags=[WEIGHTS]))
        found["wake_kv"] = self._ms(lambda: self.engine.wake_up(tags=[KV_CACHE]))
        after = self._state()
        parts = [
            what
            for what, then, now in zip(("weights", "output"), before, after, strict=True)
            if then != now
        ]
        return {"times": found, "lost": f"changed: {', '.join(parts)}" if parts else ""}

    def tag_bytes(self) -> dict[str, Any]:
        """Return the size of each tag in bytes: the largest size on any worker.

        Requires memsaver's allocator.
        """
        workers = self.engine.collective_rpc("bench_tag_bytes", args=([WEIGHTS, KV_CACHE],))
        return {tag: max(found[tag] for found in workers) for tag in (WEIGHTS, KV_CACHE)}

    def _ms(self, step: Any) -> float:
        time.sleep(self._wait)
        begin = time.perf_counter()
        step()
        return round((time.perf_counter() - begin) * 1e3, 3)

    def _used(self) -> float:
        return max(used_mib(place) for place in range(self._gpus))

    def _checksums(self) -> list[str]:
        found: list[str] = self.engine.collective_rpc("bench_checksum")
        return found

    def _check_allocator(self) -> None:
        for held in self.engine.collective_rpc("bench_held"):
            if bool(held["memsaver"]) != (self._name == OURS) or bool(held["vllm"]) != (
                self._name == THEIRS
            ):
                raise RuntimeError(
                    f"this engine should have the allocator of {self._name}; its bytes are {held}"
                )
