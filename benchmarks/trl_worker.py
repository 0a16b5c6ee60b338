"""Run TRL's GRPOTrainer with a colocated vLLM in a separate process, and time vLLM's sleeps.

TRL and vLLM are unmodified. The worker replaces the engine class that TRL uses with a subclass. The
subclass records the duration of each `sleep` and `wake_up`, and adds the vLLM settings for which
GRPOConfig has no option.
"""

from __future__ import annotations

import cProfile
import functools
import hashlib
import importlib
import io
import os
import pstats
import time
from collections.abc import Callable
from typing import Any, ClassVar

import framework_model
import workloads
from device_memory import DeviceMemory, Peaks
from libraries import OURS
from serve import Worker

SAMPLES, GROUP, TOKENS = 16, 4, 48  # responses per step and per prompt, and tokens per response
CONTEXT = 256
KEPT = ("loss", "reward", "grad_norm")  # logged by TRL, and equal in two runs
PROFILED = 3  # calls: the first sleep, and the wake-ups of weights and KV cache that follow it
LINES = 40  # of a profile


class Calls:
    """The durations of an engine's sleeps and wake-ups, in the order of the calls."""

    def __init__(self, synchronize: Callable[[], object], profile: bool) -> None:
        self.seconds: list[tuple[str, float]] = []
        self.profiles: list[str] = []
        self._synchronize = synchronize
        self._profile = profile

    def timed(self, name: str, call: Callable[[], Any]) -> Any:
        """Wait until the GPU is idle, make a call, and record the call's duration."""
        self._synchronize()
        profiler = cProfile.Profile() if self._profile and len(self.seconds) < PROFILED else None
        begin = time.perf_counter()
        found = profiler.runcall(call) if profiler else call()
        self._synchronize()
        self.seconds.append((name, round(time.perf_counter() - begin, 6)))
        if profiler:
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).sort_stats("cumulative").print_stats(LINES)
            self.profiles.append(f"{name}: {text.getvalue()}")
        return found


def timed_engine(engine: type[Any], settings: dict[str, Any], calls: Calls) -> type[Any]:
    """Return a subclass of vLLM's `LLM` that has additional settings and records its sleeps."""

    class TimedEngine(engine):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **{**named, **settings})

        def sleep(self, level: int = 1, **named: Any) -> Any:
            sleep = super().sleep
            return calls.timed("sleep", lambda: sleep(level=level, **named))

        def wake_up(self, tags: list[str] | None = None) -> Any:
            wake_up = super().wake_up
            name = " ".join(("wake", *(tags or ())))
            return calls.timed(name, lambda: wake_up(tags=tags))

    return TimedEngine


class GrpoWorker(Worker):
    """A worker that trains a small model with GRPO.

    Args:
        name: either OURS or THEIRS, which must match the allocator that the engine uses.
        model: the model's directory.
        small: ignored.
        wait: ignored.
        device: the device, which is "cpu" for a fake vLLM.
        fraction: vllm_gpu_memory_utilization.
        steps: the number of training steps.
        attention: vLLM's attention backend.
        profile: whether the first sleep and wake-up run under Python's profiler.
    """

    imports: ClassVar[tuple[str, ...]] = ("torch", "vllm", "trl")

    def __init__(
        self,
        name: str,
        model: str,
        small: bool,
        wait: float,
        device: str,
        fraction: float,
        steps: int,
        attention: str,
        profile: bool,
    ) -> None:
        del small, wait
        self._name, self._model, self._cpu = name, model, device == "cpu"
        self._fraction, self._steps, self._attention = fraction, steps, attention
        self._calls = Calls(self._synchronize, profile)
        self._responses: list[str] = []
        self._logs: list[dict[str, float]] = []
        self._seconds: list[float] = []

    def train(self) -> dict[str, Any]:
        """Train, and return the measurements of each step and the duration of each call.

        "steps": for each step, KEPT, a digest of the responses, and seconds.
        "calls": the name and the seconds of each sleep and wake-up.
        """
        begin = time.perf_counter()
        trainer = self._trainer()
        started = time.perf_counter() - begin
        self._check_allocator()
        if self._cpu:
            trainer.train()
            peak = 0
        else:
            peaks = Peaks(DeviceMemory().used)
            with peaks.stage("train"):
                trainer.train()
            peak = peaks.stages["train"]
        if self._calls.profiles and self._name == OURS and not self._cpu:
            self._calls.profiles += [self._bare_driver(), str(self._memory())]
        rows = zip(self._logs, self._responses, self._seconds, strict=True)
        return {
            "start": round(started, 3),
            "steps": [
                {**{key: row[key] for key in KEPT}, "responses": response, "seconds": seconds}
                for row, response, seconds in rows
            ],
            "calls": self._calls.seconds,
            "peak_MiB": round(peak / (1 << 20), 1),
            "profiles": self._calls.profiles,
        }

    def _trainer(self) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        generation = importlib.import_module("trl.generation.vllm_generation")
        generation.LLM = timed_engine(generation.LLM, self._settings(), self._calls)
        config = GRPOConfig(
            output_dir=os.path.join(self._model, "trained"),
            max_steps=self._steps,
            per_device_train_batch_size=SAMPLES,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            learning_rate=1e-4,
            temperature=1.0,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=framework_model.SEED,
            bf16=not self._cpu,
            use_cpu=self._cpu,
            gradient_checkpointing=False,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=True,
            vllm_gpu_memory_utilization=self._fraction,
            vllm_max_model_length=CONTEXT,
        )
        prompts = framework_model.prompts(SAMPLES // GROUP * self._steps)
        return GRPOTrainer(
            model=self._model,
            args=config,
            reward_funcs=self._reward,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[self._callback()],
        )

    def _settings(self) -> dict[str, Any]:
        """Return arguments of vLLM's `LLM`; slow compilation is turned off."""
        return {
            "attention_config": {"backend": self._attention},
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, SAMPLES],
            },
            "disable_log_stats": True,
        }

    def _reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self._responses.append(hashlib.sha256(str(completion_ids).encode()).hexdigest()[:16])
        return [framework_model.reward(tokens) for tokens in completion_ids]

    def _callback(self) -> Any:
        from transformers import TrainerCallback

        worker = self

        class Record(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                worker._synchronize()
                self.begin = time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                worker._synchronize()
                worker._seconds.append(round(time.perf_counter() - self.begin, 6))

            def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
                if "loss" in logs:
                    worker._logs.append({key: float(logs[key]) for key in KEPT})

        return Record()

    def _memory(self) -> Any:
        import memsaver

        return memsaver.stats()

    def _bare_driver(self) -> str:
        """Time bare driver calls for the number of bytes that the sleeping engine has released."""
        from raw_driver import RawDriver

        driver = RawDriver()
        total = driver.setup("all", sum(row.allocated_bytes for row in self._memory().tags))
        calls = (driver.pause, driver.resume)
        times = [workloads.timed_ms(functools.partial(call, "all")) for call in calls]
        driver.pause("all")
        time.sleep(0.5)  # the driver clears the memory during this time
        times.append(workloads.timed_ms(lambda: driver.resume("all")))
        driver.pause("all")
        return (
            f"bare driver, {total} bytes: release {times[0]:.1f} ms, map at once {times[1]:.1f} "
            f"ms, map after a rest {times[2]:.1f} ms"
        )

    def _synchronize(self) -> None:
        import torch

        if not self._cpu:
            torch.cuda.synchronize()

    def _check_allocator(self) -> None:
        owner = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator
        is_ours = type(owner.instance) is not owner
        if owner.instance is None or is_ours != (self._name == OURS):
            raise RuntimeError(f"this engine's allocator is {owner.instance}, not {self._name}'s")
