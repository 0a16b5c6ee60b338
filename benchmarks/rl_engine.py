"""Run an engine and a trainer on one GPU through an RL step, stage by stage.

A step begins with the engine awake and the trainer asleep:

    engine_sleep     pause the engine's KV cache, weights and graphs              transition
    trainer_wake     resume the trainer's weights and optimizer states            transition
    train            compute gradients, with kernels over all of the trainer's memory
    optimizer_sleep  pause the optimizer's states, and drop the cached gradients  transition
    weights_wake     resume the engine's weights and graphs                       transition
    update           send the trainer's weights to the engine in buckets
    copy_goes        pause the trainer's weights                                  transition
    kv_wake          resume the KV cache                                          transition
    generate

If all memory is resumed at once, weights_wake also resumes the KV cache, and kv_wake is omitted.
The first step of an engine has the stage "make" instead of trainer_wake; in this stage, the trainer
allocates its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from device_memory import DeviceMemory, Peaks
from engine_model import BIG, SMALL, let_go
from libraries import OURS
from sglang_engine import GRAPH, KV_CACHE, TAGS, WEIGHTS, EngineWorker

if TYPE_CHECKING:
    from rl_trainer import Trainer as RlTrainer

TRANSITIONS = (
    "engine_sleep",
    "trainer_wake",
    "optimizer_sleep",
    "weights_wake",
    "copy_goes",
    "kv_wake",
)
WORK = ("train", "update", "generate")
# The memory in use in these stages does not depend on the engine's KV cache.
ENGINE_AWAY = ("make", "trainer_wake", "train", "optimizer_sleep")

# Requests for generation: a prefill as large as SGLang's chunks on this GPU, and some decoding.
REQUESTS, PROMPT, TOKENS = 8, 1024, 64


class Loop(EngineWorker):
    """A worker that runs steps of an engine and of a trainer in one process.

    Args:
        name: the memory saver of engine and trainer.
        model: the model's directory.
        small: whether the model is the small one.
        fraction: mem_fraction_static.
        backup: whether the engine's weights have a backup.
        wait: the seconds to wait before the engine sleeps.
        device: the trainer's torch device.
        states: the number of optimizer states for each weight.
        bucket_bytes: the maximum number of bytes in a bucket of weights; a larger weight is sent
            alone.
        tokens: the KV cache's maximum number of tokens; 0 allows as many as the fraction allows.
    """

    def __init__(
        self,
        name: str,
        model: str,
        small: bool,
        fraction: float,
        backup: bool,
        wait: float,
        device: str,
        states: int,
        bucket_bytes: int,
        tokens: int = 0,
    ) -> None:
        super().__init__(name, model, small, fraction, backup, wait, device, tokens=tokens)
        self._shape = SMALL if small else BIG
        self._device = device
        self._states, self._bucket_bytes = states, bucket_bytes
        self._memory = DeviceMemory()
        self._peaks = Peaks(self._memory.used)
        self._seconds: dict[str, float] = {}
        self._held: RlTrainer | None = None  # the trainer with all its memory, once it exists
        self._sent = ""  # the checksum of the engine's weights

    def start(self) -> dict[str, Any]:
        """Start the engine; also return its KV cache's size in tokens and the GPU's memory."""
        with self._peaks.stage("start"):
            found = super().start()
        self._start_peak = self._peaks.stages.pop("start")
        capacities = {int(state["memory_usage"]["token_capacity"]) for state in self.states()}
        return found | {"tokens": min(capacities), "total": self._memory.total}

    def alone(self) -> dict[str, Any]:
        """Generate without a trainer.

        The function first empties torch's cache, because a release does so too.
        """
        self._begin()
        self.rest()
        if not self.engine.flush_cache().success:
            raise RuntimeError("the engine did not flush its cache: it is not idle")
        self._stage("generate", self.rollout)
        return self._found()

    def fit(self, at_once: bool) -> dict[str, Any]:
        """Run a step. "refused" in the result reports a lack of memory; other errors are raised."""
        try:
            return self.step(seed=1, at_once=at_once)
        except Exception as error:
            if self._is_want_of_memory(error):
                return {"refused": str(error)}
            raise

    def step(self, seed: int, at_once: bool = False) -> dict[str, Any]:
        """Run a step; return each stage's duration in seconds and bytes in use.

        In the result, "lost" reports changed contents, "unchecked" explains why the engine's
        contents are unknown, and "weights" is the checksum of the engine's weights after the
        update.
        """
        self._begin()
        if self._backup and not self._sent:
            self._sent, _ = self.checksum()
        self.rest()
        self._stage("engine_sleep", lambda: self.release(TAGS))
        if self._held is None:
            self._stage("make", self._make)
        else:
            self._stage("trainer_wake", self._held.wake)
            self._lost = self._held.lost()
        trainer = self._held
        assert trainer is not None
        self._stage("train", lambda: self._train(seed))
        trainer.remember()
        self._stage("optimizer_sleep", trainer.sleep_optimizer)
        self._stage("weights_wake", lambda: self.resume(TAGS if at_once else (GRAPH, WEIGHTS)))
        self._check_weights()
        self._stage("update", self.update_in_buckets)
        self._stage("copy_goes", trainer.sleep_weights)
        if not at_once:
            self._stage("kv_wake", lambda: self.resume((KV_CACHE,)))
        self._stage("generate", self.rollout)
        return self._found() | self._checked()

    def release(self, tags: Sequence[str]) -> None:
        """Release tags of the engine in one call."""
        answers = self.engine.release_memory_occupation(tags=list(tags))
        for tag in tags:
            self._check_answers(tag, answers)

    def resume(self, tags: Sequence[str]) -> None:
        """Resume tags of the engine in one call."""
        answers = self.engine.resume_memory_occupation(tags=list(tags))
        for tag in tags:
            self._check_answers(tag, answers)

    def rollout(self) -> None:
        """Generate, and check the number of tokens."""
        prompts = [
            [10 + (37 * number + at) % 8000 for at in range(PROMPT)] for number in range(REQUESTS)
        ]
        tokens = self.generate(prompts, TOKENS)
        if tokens != REQUESTS * TOKENS:
            raise RuntimeError(f"the engine generated {tokens} of {REQUESTS * TOKENS} tokens")

    def update_in_buckets(self) -> None:
        """Send the trainer's weights to the engine, in buckets outside any region.

        On return, the engine has released the buckets, and their memory has been released to the
        driver.
        """
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        assert self._held is not None
        before = self._allocated()
        parts = list(buckets(self._held.weights, self._bucket_bytes))
        for number, part in enumerate(parts):
            bucket = FlattenedTensorBucket(named_tensors=part)
            self._held.finish_writes()
            payload = MultiprocessingSerializer.serialize(
                {
                    "flattened_tensor": bucket.get_flattened_tensor(),
                    "metadata": bucket.get_metadata(),
                },
                output_str=True,
            )
            done, message = self.engine.update_weights_from_tensor(
                [payload],
                load_format="flattened_bucket",
                flush_cache=number == len(parts) - 1,
            )
            if not done:
                raise RuntimeError(f"the weights were not updated: {message}")
            del bucket
            self._collect()
        let_go(self._device, before)

    def _train(self, seed: int) -> None:
        """Run the trainer's part of a step."""
        assert self._held is not None
        self._held.train(seed)

    def _is_want_of_memory(self, error: Exception) -> bool:
        """Return whether an error means that the trainer, a saver or the engine lacks memory."""
        import torch

        if self._name == OURS:
            import memsaver

            if isinstance(error, memsaver.OutOfDeviceMemoryError):
                return True
        return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()

    def _make(self) -> None:
        from rl_trainer import Trainer

        self._held = Trainer(self._name, self._shape, self._states, self._device)

    def _begin(self) -> None:
        self._seconds, self._lost = {}, ""
        self._peaks.stages.clear()

    def _stage(self, name: str, call: Callable[[], object]) -> None:
        """Time a call, with the trainer's device idle before and after it, and measure memory."""
        self._synchronise()
        with self._peaks.stage(name):
            begin = time.perf_counter()
            call()
            self._synchronise()
            self._seconds[name] = round(time.perf_counter() - begin, 4)

    def _synchronise(self) -> None:
        if self._held is not None:
            self._held.synchronise()

    def _found(self) -> dict[str, Any]:
        stages = self._peaks.stages
        tight = [peak for name, peak in stages.items() if name not in ENGINE_AWAY]
        return {
            "seconds": dict(self._seconds),
            "peaks": dict(stages),
            "spare": self._memory.total - max(self._start_peak, *tight),
            "refused": "",
        }

    def _check_weights(self) -> None:
        """Check that a resume restored the engine's weights, if they have a backup."""
        if self._backup and self._sent and not self._lost:
            found, problem = self.checksum()
            if found != self._sent:
                self._lost = f"the engine's weights: {problem or found}"

    def _checked(self) -> dict[str, Any]:
        """Check the contents after an update; return the fields for the result of `step`."""
        if not self._backup:
            return {"lost": self._lost, "unchecked": "", "weights": ""}
        old, (self._sent, unchecked) = self._sent, self.checksum()
        if self._sent and self._sent == old:
            raise RuntimeError("the update did not change the weights")
        return {"lost": self._lost, "unchecked": unchecked, "weights": self._sent}

    def _collect(self) -> None:
        """Make torch reuse the memory of buckets that the engine has released."""
        import torch

        if self._device == "cuda":
            torch.cuda.ipc_collect()

    def _allocated(self) -> int:
        import torch

        return int(torch.cuda.memory_allocated()) if self._device == "cuda" else 0


def buckets(weights: Iterable[tuple[str, Any]], at_most: int) -> Iterator[list[tuple[str, Any]]]:
    """Yield weights in order, in groups of up to `at_most` bytes or of one larger weight."""
    part: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in weights:
        if part and size + tensor.nbytes > at_most:
            yield part
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    if part:
        yield part
