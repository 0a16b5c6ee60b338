"""Run an SGLang engine in a separate process, with one of the two memory savers.

SGLang itself finds the saver: memsaver through its plugin, or torch_memory_saver if the plugin is
disabled. Both may be installed. Each start checks that the engine uses the named saver.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import engine_process as processes
from children import Child
from engine_model import BIG, SMALL, Trainer
from engine_process import inherited_without, used_mib
from libraries import OURS, RETAINED
from serve import Worker

BENCH = "sglang_cycle"
PLAIN = "plain"  # an engine without a memory saver
KV_CACHE, WEIGHTS, GRAPH = "kv_cache", "weights", "cuda_graph"
TAGS = (KV_CACHE, WEIGHTS, GRAPH)

PEER_DISTRIBUTION = "torch_memory_saver"
PEER_LIBRARY = "torch_memory_saver_hook"  # in the names of the peer's libraries

# Prefixes of environment variables for the savers, SGLang's plugins and torch's allocator. The
# benchmark sets these variables itself.
DROPPED = (
    "LD_PRELOAD",
    "MEMSAVER_",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SGLANG_PLATFORM",
    "SGLANG_PLUGINS",
    "TMS_",
)


def why_no_peer() -> str:
    """Return the reason why torch_memory_saver cannot be measured; "" if it can."""
    if importlib.util.find_spec(PEER_DISTRIBUTION) is None:
        return "torch_memory_saver is not installed"
    try:
        version = importlib.metadata.version(PEER_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return ""  # installed without its metadata
    if "memsaver" in version.partition("+")[2]:
        return f"torch_memory_saver {version} is memsaver under that name"
    return ""


def environment(name: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables of an engine with the named saver; PLAIN means none."""
    found = inherited_without(DROPPED, inherited)
    found["MEMSAVER_SGLANG"] = "1" if name == OURS else "0"
    if name == RETAINED:
        found["TMS_RETAIN_CPU_BACKUP"] = "1"
    if name != PLAIN:
        found["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    found.setdefault("NCCL_GRAPH_REGISTER", "0")
    found.setdefault("SGLANG_IS_FLASHINFER_AVAILABLE", "false")  # its kernels are not needed
    return found


def engine_process(
    worker: str,
    name: str,
    options: argparse.Namespace,
    variables: Mapping[str, str] | None = None,
    **settings: Any,
) -> Child:
    """Start a process that imports SGLang; see `engine_process.process`.

    Args:
        worker: the process's worker.
        name: the engine's memory saver, or PLAIN.
        options: the benchmark's options.
        variables: additional environment variables of the engine.
        settings: additional arguments of the worker.
    """
    environ = environment(name) | dict(variables or {})
    return processes.process(worker, name, environ, options, **settings)


def running(
    worker: str, name: str, options: argparse.Namespace, **settings: Any
) -> AbstractContextManager[tuple[Child, dict[str, Any]]]:
    """Start an engine for the block; see `engine_process.running`."""
    return processes.running(lambda: engine_process(worker, name, options, **settings), options)


def mapped(part: str) -> bool:
    """Return whether a process of this session has mapped a file with `part` in its path."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has exited, or belongs to another user
            if os.getsid(int(pid)) == os.getsid(0) and part in Path(f"/proc/{pid}/maps").read_text(
                errors="replace"
            ):
                return True
    return False


class EngineWorker(Worker):
    """A worker that starts the engine and calls it for all measurements.

    Args:
        name: the name of the memory saver, or PLAIN.
        model: the model's directory.
        small: whether the model is the small one.
        fraction: mem_fraction_static.
        backup: whether weights have a backup.
        wait: the seconds for which `rest` waits while the driver clears released memory.
        trainer_bytes: the size of the trainer's memory, if larger than the weights.
        device: the trainer's torch device.
        tokens: the KV cache's maximum number of tokens; 0 allows as many as the fraction allows.
        gpus: the number of GPUs, for tensor parallelism.
    """

    imports: ClassVar[tuple[str, ...]] = ("torch", "sglang")

    def __init__(
        self,
        name: str,
        model: str,
        small: bool,
        fraction: float,
        backup: bool,
        wait: float,
        device: str,
        trainer_bytes: int = 0,
        tokens: int = 0,
        gpus: int = 1,
    ) -> None:
        self._name = name
        self._limits = {"max_total_tokens": tokens} if tokens else {}
        if gpus > 1:
            self._limits["tp_size"] = gpus
        self._model, self._fraction, self._backup = model, fraction, backup
        self._wait = wait
        self.trainer = Trainer(SMALL if small else BIG, trainer_bytes, device)

    def start(self) -> dict[str, Any]:
        """Start the engine, and check its memory saver."""
        import sglang

        begin = time.perf_counter()
        self.engine = sglang.Engine(
            model_path=self._model,
            load_format="dummy",
            skip_tokenizer_init=True,
            attention_backend="triton",
            sampling_backend="pytorch",
            mem_fraction_static=self._fraction,
            enable_memory_saver=self._name != PLAIN,
            enable_weights_cpu_backup=self._backup,
            cuda_graph_bs_decode=[1, 2, 4, 8],
            disable_prefill_cuda_graph=True,
            random_seed=1,
            log_level="warning",
            **self._limits,
        )
        seconds = round(time.perf_counter() - begin, 3)
        self.generate([[5, 6, 7, 8]], 16)
        self._check_saver()
        return {"seconds": seconds, "used": used_mib()}

    def stop(self) -> dict[str, Any]:
        """Shut the engine down."""
        self.engine.shutdown()
        return {}

    def rest(self) -> None:
        """Wait while the driver clears released memory and the engine becomes idle."""
        time.sleep(self._wait)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        """Generate `tokens` tokens for each prompt; return the total number."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        ids = [list(prompt) for prompt in prompts]
        replies = self.engine.generate(input_ids=ids, sampling_params=sampling)
        return sum(len(reply["output_ids"]) for reply in replies)

    def release_ms(self, tag: str) -> float:
        """Release a tag; return the duration in milliseconds, measured by the caller."""
        begin = time.perf_counter()
        answers = self.engine.release_memory_occupation(tags=[tag])
        spent = round((time.perf_counter() - begin) * 1e3, 3)
        self._check_answers(tag, answers)
        return spent

    def resume_ms(self, tag: str) -> float:
        """Resume a tag; return the duration in milliseconds, measured by the caller."""
        begin = time.perf_counter()
        answers = self.engine.resume_memory_occupation(tags=[tag])
        spent = round((time.perf_counter() - begin) * 1e3, 3)
        self._check_answers(tag, answers)
        return spent

    def update(self) -> None:
        """Send the trainer's weights to the engine, which copies them into its own weights."""
        done, message = self.engine.update_weights_from_tensor(self.trainer.weights)
        if not done:
            raise RuntimeError(f"the weights were not updated: {message}")

    def checksum(self) -> tuple[str, str]:
        """Return (checksum of all weights, ""), or ("", the reason why there is no checksum)."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        ask = self.engine.tokenizer_manager.check_weights
        request = CheckWeightsReqInput(action="checksum")
        done, message, _, checksum = self.engine.loop.run_until_complete(ask(request, None))
        return (checksum, "") if done and checksum else ("", message or "no checksum")

    def states(self) -> list[dict[str, Any]]:
        """Return the internal state of each scheduler."""
        ask = self.engine.tokenizer_manager.get_internal_state
        found: list[dict[str, Any]] = self.engine.loop.run_until_complete(ask())
        return found

    def _check_saver(self) -> None:
        states = self.states()
        ours = bool(states) and all("memsaver" in state for state in states)
        theirs = mapped(PEER_LIBRARY)
        expected = (self._name == OURS, self._name not in (OURS, PLAIN))
        if (ours, theirs and self._name != PLAIN) != expected:
            raise RuntimeError(
                f"this engine should have the saver of {self._name}; memsaver's hooks are "
                f"{'there' if ours else 'not there'}, torch_memory_saver's library is "
                f"{'loaded' if theirs else 'not loaded'}"
            )

    def _check_answers(self, tag: str, answers: Any) -> None:
        """Check the bytes that memsaver's hooks report. Pausable graphs are optional."""
        if self._name == OURS and tag != GRAPH:
            ranks = [rank for answer in answers or () for rank in answer.ranks]
            if not ranks or not all(rank.device_bytes.get(tag) for rank in ranks):
                raise RuntimeError(f"memsaver did not move the memory of {tag}: {answers}")
