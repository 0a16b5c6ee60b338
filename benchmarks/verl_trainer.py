"""Run verl's own trainer with one of the two memory savers, and read the trainer's reports.

The trainer is `verl.trainer.main_ppo`, which uses GRPO, a local Ray cluster, FSDP2, and SGLang on
the same GPUs. verl's file log and its dump of the responses are read after the run.
`verl_watch`, which verl imports, records the requests to the engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import verl_watch
from children import Failed
from libraries import OURS
from sglang_engine import environment as engine_environment
from verl_model import MODEL, PROMPTS

ROOT = Path(__file__).resolve().parent
LOG, METRICS, RECORD, RESPONSES = "log.txt", "metrics.jsonl", "record.jsonl", "responses"
LOG_LINES = 40  # quoted if a trainer fails
OBJECTS = 4 << 30  # bytes of Ray's object store
MICRO = 8  # the maximum number of sequences in a forward pass of the trainer
END_SECONDS = 30  # limit for a trainer that was asked to end, and for its killed processes


@dataclass(frozen=True)
class Settings:
    """The settings of a training run.

    Attributes:
        folder: the folder with the model and the prompts; see `verl_model.save`.
        steps: the number of steps.
        gpus: the number of GPUs, for FSDP2 and for tensor parallelism of the engine.
        fraction: verl's gpu_memory_utilization.
        prompts: the number of prompts in a step.
        answers: the number of responses to each prompt.
        tokens: the maximum length of a response.
        variables: additional environment variables.
    """

    folder: Path
    steps: int
    gpus: int = 1
    fraction: float = 0.5
    prompts: int = 8
    answers: int = 4
    tokens: int = 128
    variables: Mapping[str, str] = field(default_factory=dict)


def arguments(settings: Settings, results: Path) -> list[str]:
    """Return the command line of verl's trainer; verl's defaults apply to all other settings."""
    model, prompts = settings.folder / MODEL, settings.folder / PROMPTS
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    micro = min(MICRO, settings.prompts * settings.answers // settings.gpus)
    given: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": prompts,
        "data.val_files": prompts,
        "data.train_batch_size": settings.prompts,
        "data.max_prompt_length": 64,
        "data.max_response_length": settings.tokens,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.model.use_remove_padding": False,  # True requires flash-attn
        f"{actor}.strategy": "fsdp2",
        f"{actor}.optim.lr": 1e-5,
        f"{actor}.ppo_mini_batch_size": settings.prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": micro,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{rollout}.name": "sglang",
        f"{rollout}.n": settings.answers,
        f"{rollout}.tensor_model_parallel_size": settings.gpus,
        f"{rollout}.gpu_memory_utilization": settings.fraction,
        f"{rollout}.free_cache_engine": True,
        f"{rollout}.max_num_seqs": 64,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro,
        f"{rollout}.agent.num_workers": 1,
        f"+{rollout}.engine_kwargs.sglang.attention_backend": "triton",
        f"+{rollout}.engine_kwargs.sglang.sampling_backend": "pytorch",
        f"+{rollout}.engine_kwargs.sglang.random_seed": 1,
        f"+{rollout}.engine_kwargs.sglang.disable_prefill_cuda_graph": True,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": ROOT / "verl_reward.py",
        "trainer.project_name": "memsaver",
        "trainer.experiment_name": "grpo",
        "trainer.logger": "[console,file]",
        "trainer.total_training_steps": settings.steps,
        "trainer.total_epochs": settings.steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.n_gpus_per_node": settings.gpus,
        "trainer.nnodes": 1,
        "trainer.default_local_dir": results / "checkpoints",
        "trainer.rollout_data_dir": results / RESPONSES,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": OBJECTS,
        "hydra.run.dir": results / "hydra",
    }
    return [f"{name}={value}" for name, value in given.items()]


def environment(name: str, settings: Settings, results: Path) -> dict[str, str]:
    """Return the environment variables of a trainer whose engine uses the named saver."""
    found = engine_environment(name)
    del found["SGLANG_MEMORY_SAVER_CUDA_GRAPH"]  # verl does not set it
    found |= {
        "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VERL_FILE_LOGGER_PATH": str(results / METRICS),
        "VERL_USE_EXTERNAL_MODULES": verl_watch.__name__,
        verl_watch.FILE: str(results / RECORD),
    }
    places = (str(ROOT), found.get("PYTHONPATH", ""))
    found["PYTHONPATH"] = os.pathsep.join(place for place in places if place)
    return found | settings.variables


class Trainer:
    """A running trainer, as a context manager that terminates all of its processes on exit.

    Args:
        name: the memory saver.
        settings: the settings of the training run.
        results: an existing folder for everything that the trainer writes.
    """

    def __init__(self, name: str, settings: Settings, results: Path) -> None:
        self.name, self.settings, self.results = name, settings, results
        self._log = (results / LOG).open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *arguments(settings, results)],
            env=environment(name, settings, results),
            cwd=results,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def wait(self, seconds: float) -> int:
        """Wait until the trainer exits; return its exit status. Raises Failed after `seconds`."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(
                f"{self.name}: verl did not end in {seconds:.0f} s; {self.log()}"
            ) from None

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Wait until a step has ended. Raises Failed after `seconds` or if the trainer exits."""
        end = time.monotonic() + seconds
        while len(lines(self.results / METRICS)) < step:
            if self._process.poll() is not None or time.monotonic() > end:
                raise Failed(
                    f"{self.name}: step {step} did not end in {seconds:.0f} s; {self.log()}"
                )
            time.sleep(0.2)

    def interrupt(self) -> None:
        """Send SIGINT to the trainer's process group, as Ctrl-C does."""
        os.killpg(self._process.pid, signal.SIGINT)

    def log(self) -> str:
        """Return the end of the log."""
        text = (self.results / LOG).read_text(errors="replace").splitlines()
        return "\n".join([f"the end of {self.results / LOG}:", *text[-LOG_LINES:]])

    def left(self) -> list[int]:
        """Return the ids of the trainer's running processes, as identified by their environment."""
        marker = f"{verl_watch.FILE}={self.results / RECORD}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and marker in (entry / "environ").read_bytes().split(
                    b"\0"
                ):
                    found.append(int(entry.name))
        return found

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        end = time.monotonic() + END_SECONDS
        # Repeated, because a process that is being killed may have started another one.
        while (left := self.left()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._process.wait()
        self._log.close()


@dataclass(frozen=True)
class Found:
    """The results of a training run.

    Attributes:
        metrics: the metrics that verl reports for each step.
        responses: the sorted responses of each step, with their prompts and scores.
        cycles: the total duration of the release and the resumes in each step, in seconds.
        sleeping: the bytes in use after the release in each step; None if NVML is missing.
        tokens: the capacity of the engine's KV cache, in tokens.
    """

    metrics: list[dict[str, float]]
    responses: list[list[tuple[str, str, float]]]
    cycles: list[float]
    sleeping: list[int | None]
    tokens: int


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the parsed complete lines of a JSON Lines file; none if the file does not exist."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def read(name: str, results: Path) -> Found:
    """Return the results of a training run with the named saver. Raises Failed."""
    metrics = [line["data"] for line in lines(results / METRICS)]
    record = lines(results / RECORD)
    started = [line for line in record if line["call"] == verl_watch.STARTED]
    expected = OURS if name == OURS else "torch_memory_saver"
    if [line["saver"] for line in started] != [expected]:
        raise Failed(f"{name}: the engines do not use {expected}: {started}")
    cycles, sleeping = cycles_of(record)
    if len(cycles) < len(metrics):
        raise Failed(f"{name}: {len(metrics)} steps, but {len(cycles)} cycles of sleep and wake-up")
    responses = [
        sorted(
            (line["input"], line["output"], line["score"])
            for line in lines(results / RESPONSES / f"{step}.jsonl")
        )
        for step in range(1, len(metrics) + 1)
    ]
    return Found(metrics, responses, cycles, sleeping, started[0]["tokens"])


def cycles_of(record: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[int | None]]:
    """Return the seconds of each step's sleep and resumes, and the bytes in use after each sleep.

    verl also releases and resumes the engine once before the first step.
    """
    seconds: list[float] = []
    used: list[int | None] = []
    for line in record:
        if line["call"] == verl_watch.SLEEP:
            seconds.append(0.0)
            used.append(line["used"])
        if line["call"] != verl_watch.STARTED and seconds:
            seconds[-1] += line["seconds"]
    return [round(total, 6) for total in seconds[1:]], used[1:]
