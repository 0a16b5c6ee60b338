"""Run transformers' Trainer with a reference model in a separate process.

The loss includes the divergence from a frozen reference model. The reference model is needed only
to compute log-probabilities. After each step, the trainer sleeps, as it would while an engine
generates. A class in `MEMORY` determines how the memory of the reference, the weights and the
optimizer is released and restored.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import framework_model
from device_memory import DeviceMemory, Peaks
from engine_model import HEAD, KV_HEADS, SMALL, Shape
from libraries import OURS
from serve import Worker

LARGE = Shape(layers=24, hidden=2048, inter=6144, vocab=8192, heads=16)  # 1.2e9 parameters
BATCH, LENGTH = 8, 512
BETA = 0.1
MOVES, RESIDENT = "moves", "resident"
KEPT = ("loss", "grad_norm")


class Resident:
    """Memory that always stays on the device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def begin(self, model: Any, optimizer: Any, reference: Any) -> None:
        """Store the objects before the first step."""

    def wake_reference(self) -> None:
        """Restore the reference model."""

    def drop_reference(self) -> None:
        """Release the reference model."""

    def sleep(self) -> None:
        """Release weights and optimizer."""

    def wake(self) -> None:
        """Restore weights and optimizer."""

    def _empty(self) -> None:
        import torch

        if self._device == "cuda":
            torch.cuda.empty_cache()  # of gradients and activations


class Tags(Resident):
    """memsaver's tags, through `offload`."""

    def begin(self, model: Any, optimizer: Any, reference: Any) -> None:
        """See the base class."""
        import memsaver
        from memsaver.integrations.trainer import offload

        self._memsaver = memsaver
        self._offloaded = [
            offload(optimizer, model, tag="trainer"),
            offload(reference, tag="reference"),
        ]
        self.drop_reference()

    def wake_reference(self) -> None:
        """See the base class."""
        self._memsaver.resume("reference")

    def drop_reference(self) -> None:
        """See the base class."""
        self._memsaver.pause("reference")

    def sleep(self) -> None:
        """See the base class."""
        self._memsaver.pause("trainer")
        self._empty()

    def wake(self) -> None:
        """See the base class."""
        self._memsaver.resume("trainer")


class Moves(Resident):
    """Memory that `Tensor.to` moves to newly allocated host memory and back each time."""

    def begin(self, model: Any, optimizer: Any, reference: Any) -> None:
        """See the base class."""
        self._model, self._optimizer, self._reference = model, optimizer, reference
        self.drop_reference()

    def wake_reference(self) -> None:
        """See the base class."""
        self._reference.to(self._device)

    def drop_reference(self) -> None:
        """See the base class."""
        self._reference.to("cpu")
        self._empty()

    def sleep(self) -> None:
        """See the base class."""
        self._move("cpu")
        self._empty()

    def wake(self) -> None:
        """See the base class."""
        self._move(self._device)

    def _move(self, device: str) -> None:
        self._model.to(device)
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if getattr(value, "ndim", 0):  # not the step counter
                    state[name] = value.to(device)


MEMORY: dict[str, type[Resident]] = {OURS: Tags, MOVES: Moves, RESIDENT: Resident}


class TrainerWorker(Worker):
    """A worker that trains a model on random tokens.

    Args:
        name: a key of `MEMORY`.
        model: a folder for the trainer's output.
        small: ignored.
        wait: the number of seconds to sleep after each step.
        device: either "cuda", or "cpu" with a small model.
        steps: the number of training steps.
    """

    imports: ClassVar[tuple[str, ...]] = ("torch", "transformers", "accelerate")

    def __init__(
        self, name: str, model: str, small: bool, wait: float, device: str, steps: int
    ) -> None:
        del small
        self._folder, self._wait, self._device, self._steps = model, wait, device, steps
        self._memory = MEMORY[name](device)
        self._logs: list[dict[str, float]] = []
        self._seconds: list[float] = []
        self._transitions: list[float] = []
        self._asleep: list[float] = []
        self._spent = 0.0  # of the current step, in transitions

    def train(self) -> dict[str, Any]:
        """Train, and return the measurements of each step.

        The result's "steps" contain, for each step, the KEPT values, the step's "seconds",
        "transitions" (the total seconds of all releases and restores), and "asleep_MiB" (the memory
        in use during the sleep after the step). The releases and restores of the reference model
        are part of the step.
        """
        self._used = DeviceMemory().used if self._device == "cuda" else lambda: 0
        trainer = self._trainer()
        peaks = Peaks(self._used)
        with peaks.stage("train"):
            trainer.train()
        columns = zip(self._logs, self._seconds, self._transitions, self._asleep, strict=True)
        return {
            "steps": [
                {**logs, "seconds": seconds, "transitions": transitions, "asleep_MiB": asleep}
                for logs, seconds, transitions, asleep in columns
            ],
            "peak_MiB": round(peaks.stages["train"] / (1 << 20), 1),
        }

    def _trainer(self) -> Any:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainingArguments

        torch.use_deterministic_algorithms(True)
        on_gpu = self._device == "cuda"
        shape = LARGE if on_gpu else SMALL
        config = Qwen3Config(
            hidden_size=shape.hidden,
            intermediate_size=shape.inter,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD,
            vocab_size=shape.vocab,
            use_cache=False,
        )
        torch.manual_seed(framework_model.SEED)
        with torch.device(self._device):
            reference = Qwen3ForCausalLM(config).requires_grad_(False).eval()
            model = Qwen3ForCausalLM(config)
            length = LENGTH if on_gpu else 16
            tokens = torch.randint(shape.vocab, (BATCH * self._steps, length)).cpu()
        worker = self

        class Regularised(Trainer):
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                with worker._reference(), torch.no_grad():
                    expected = reference(inputs["input_ids"]).logits.log_softmax(-1)
                outputs = model(**inputs)
                found = outputs.logits.log_softmax(-1)
                divergence = torch.nn.functional.kl_div(
                    found, expected, reduction="batchmean", log_target=True
                )
                return outputs.loss + BETA * divergence / found.shape[1]

        arguments = TrainingArguments(
            output_dir=os.path.join(self._folder, "trained"),
            max_steps=self._steps,
            per_device_train_batch_size=BATCH,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=framework_model.SEED,
            bf16=on_gpu,
            use_cpu=not on_gpu,
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        callback = self._callback(reference)
        return Regularised(model, arguments, train_dataset=rows, callbacks=[callback])

    def _callback(self, reference: Any) -> Any:
        from transformers import TrainerCallback

        worker = self

        class Sleeper(TrainerCallback):
            def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
                worker._memory.begin(model, optimizer, reference)

            def on_step_begin(self, *_: Any, **__: Any) -> None:
                worker._synchronize()
                worker._spent, self.begin = 0.0, time.perf_counter()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                worker._synchronize()
                worker._seconds.append(round(time.perf_counter() - self.begin, 6))
                worker._sleep()

            def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
                if "loss" in logs:
                    worker._logs.append({key: float(logs[key]) for key in KEPT})

        return Sleeper()

    def _sleep(self) -> None:
        self._timed(self._memory.sleep)
        time.sleep(self._wait)
        self._asleep.append(round(self._used() / (1 << 20), 1))
        self._timed(self._memory.wake)
        self._transitions.append(round(self._spent, 6))

    @contextlib.contextmanager
    def _reference(self) -> Iterator[None]:
        self._timed(self._memory.wake_reference)
        try:
            yield
        finally:
            self._timed(self._memory.drop_reference)

    def _timed(self, call: Callable[[], object]) -> None:
        self._synchronize()
        begin = time.perf_counter()
        call()
        self._synchronize()
        self._spent += time.perf_counter() - begin

    def _synchronize(self) -> None:
        import torch

        if self._device == "cuda":
            torch.cuda.synchronize()
