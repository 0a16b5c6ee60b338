"""What a run is given: its task, its model, its steps."""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("sglang", "model")
VERIFY = ("off", "sampled", "full")


class SettingsError(ValueError):
    """Settings that no run can be made with: what does not fit."""


@dataclass(frozen=True)
class Settings:
    """Everything that a run's figures depend on, but the machine.

    Attributes:
        engine: "sglang", or "model": a copy of the model that generates in this process, for
            machines without a GPU.
        sleep: whether trainer and engine give each other their memory.
        steps: steps of rollout and training.
        prompts: problems of a step, over all ranks.
        samples: answers to each problem: a group, of which the mean is the baseline.
        largest: the largest number in a problem.
        answer_tokens: how long an answer may be.
        temperature: of the sampling.
        rate: the learning rate.
        clip: how far the ratio of new to old probability counts.
        passes: optimizer steps on the same rollout.
        rows: sequences of a forward; more are accumulated.
        seed: of the weights, the problems and the sampling.
        model: "tiny", "small" or "0.6b" for a Qwen3 with random weights, or the folder of one.
        tp: the engine's tensor-parallel ranks; 0 is all ranks.
        memory_fraction: of the GPU, for the engine's weights and KV cache.
        attention: the engine's attention backend.
        bucket_mib: weights are sent in buckets of this size, in MiB.
        verify: how what the engine holds is compared with what was sent: "off", "sampled", "full".
    """

    engine: str = "sglang"
    sleep: bool = True
    steps: int = 150
    prompts: int = 64
    samples: int = 16
    largest: int = 4
    answer_tokens: int = 3
    temperature: float = 1.0
    rate: float = 5e-4
    clip: float = 0.2
    passes: int = 1
    rows: int = 256
    seed: int = 0
    model: str = "small"
    tp: int = 0
    memory_fraction: float = 0.6
    attention: str = "triton"
    bucket_mib: int = 256
    verify: str = "sampled"

    def check(self, ranks: int) -> None:
        """See to it that so many ranks can share this run.

        Raises:
            SettingsError: the problems of a step cannot be shared out to them.
        """
        if self.prompts % ranks:
            raise SettingsError(f"{self.prompts} problems cannot be shared out to {ranks} ranks")
