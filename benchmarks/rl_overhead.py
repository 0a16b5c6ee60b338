"""Run complete RL steps as in a training loop, and separately measure the work of the steps.

A complete step consists of the stages of rl_engine.py without waits between the stages. If the
library supports it, the trainer's weights and the optimizer's states are resumed while the trainer
computes gradients, and each layer waits only for its own weights. The optimizer's states are paused
while the weights are sent. The trainer computes the gradients of a loss
(`rl_trainer.Trainer.learn`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rl_engine import WORK, Loop
from sglang_engine import GRAPH, KV_CACHE, TAGS, WEIGHTS


class Steps(Loop):
    """A worker that runs complete steps.

    Args:
        name: the memory saver of engine and trainer.
        learned: the number of tokens for which the trainer computes gradients in a step.
        options: see `Loop`.
    """

    def __init__(self, name: str, learned: int, **options: Any) -> None:
        super().__init__(name, **options)
        self._learned = learned
        self._loss = 0.0

    def apart(self, seed: int) -> dict[str, Any]:
        """Run a step with an idle device between its stages; return the seconds of its work."""
        found = self.step(seed)
        work = {stage: found["seconds"].get(stage, 0.0) for stage in WORK}
        return {"work": work, "loss": self._loss, "lost": found["lost"]}

    def whole(self, seed: int) -> dict[str, Any]:
        """Run a complete step; return its seconds, its loss, and a checksum of the new weights.

        `calls` contains the duration of each of the step's calls on the host, in milliseconds.
        """
        trainer = self._held
        assert trainer is not None  # `apart` was called before
        self.rest()
        trainer.synchronise()
        loss = 0.0

        def learn() -> None:
            nonlocal loss
            loss = trainer.learn(seed, self._learned)

        step: dict[str, Callable[[], object]] = {
            "release the engine": lambda: self.release(TAGS),
            "begin to resume the trainer": trainer.wake_overlapped,
            "train": learn,
            "begin to pause the states": trainer.begin_optimizer_sleep,
            "resume the engine's weights": lambda: self.resume((GRAPH, WEIGHTS)),
            "update": self.update_in_buckets,
            "finish to pause the states": trainer.finish_optimizer_sleep,
            "pause the trainer's weights": trainer.sleep_weights,
            "resume the KV cache": lambda: self.resume((KV_CACHE,)),
            "generate": self.rollout,
        }
        begin = time.perf_counter()
        ends = []
        for call in step.values():
            call()
            ends.append(time.perf_counter())
        starts = [begin, *ends[:-1]]
        calls = {
            name: round(1e3 * (end - start), 1)
            for name, start, end in zip(step, starts, ends, strict=True)
        }
        seconds = round(ends[-1] - begin, 4)
        return {
            "seconds": seconds,
            "calls": calls,
            "loss": loss,
            "weights": self.checksum()[0],
        }

    def contents(self) -> dict[str, Any]:
        """Wake the trainer, and return a checksum of all of its memory. No step may follow."""
        trainer = self._held
        assert trainer is not None
        self.release(TAGS)
        trainer.wake()
        return {"digest": trainer.digest()}

    def _train(self, seed: int) -> None:
        assert self._held is not None
        self._loss = self._held.learn(seed, self._learned)
