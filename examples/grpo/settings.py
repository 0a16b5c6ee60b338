"""Define a run's settings: its task, its model and its steps."""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("sglang", "vllm", "model")
VERIFY = ("off", "sampled", "full")


class SettingsError(ValueError):
    """Invalid settings; the message names the problem."""


@dataclass(frozen=True)
class Settings:
    """A run's settings. The results depend only on these settings and on the machine.

    Attributes:
        engine: "sglang", "vllm", or "model": a copy of the model that generates in this process,
            for machines without a GPU.
        sleep: whether the trainer and the engine release memory for each other.
        steps: the number of steps of rollout and training.
        prompts: the number of problems in a step, over all ranks.
        samples: the number of answers to each problem; their mean reward is the baseline.
        largest: the largest number in a problem.
        answer_tokens: the maximum number of tokens in an answer.
        temperature: the sampling temperature.
        rate: the learning rate.
        clip: the clipping range for the ratio of the new to the old probability.
        passes: the number of optimizer steps on the same rollout.
        rows: the number of sequences in a forward pass; the gradients of several forward
            passes are accumulated.
        seed: the seed of the weights, the problems and the sampling.
        model: "tiny", "small" or "0.6b" for a Qwen3 with random weights; or the folder of a
            Qwen3 checkpoint.
        tp: the number of the engine's tensor-parallel ranks; 0 means all ranks.
        memory_fraction: the fraction of the GPU's memory for the engine's weights and KV cache.
        attention: the engine's attention backend.
        bucket_mib: the size of the buckets in which weights are sent, in MiB.
        verify: the verification of sent weights: "off", "sampled" or "full".
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
        """Check that this run's problems can be divided among `ranks` ranks.

        Raises:
            SettingsError: the number of problems in a step is not a multiple of `ranks`.
        """
        if self.prompts % ranks:
            raise SettingsError(f"{self.prompts} problems cannot be divided among {ranks} ranks")
