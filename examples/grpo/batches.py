"""Convert a rollout into training rows, each a prompt and an answer, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memsaver.integrations.rollout import RolloutOutput


@dataclass(frozen=True)
class Batch:
    """This rank's rows.

    Attributes:
        tokens: int64 [rows, length]: prompt, answer, padding.
        mask: float32 [rows, length - 1]: 1 if the next token belongs to the answer, else 0.
        engine_logprobs: float32 [rows, length - 1]: the log-probabilities with which the engine
            sampled the answer's tokens; 0 elsewhere.
        advantages: float32 [rows].
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """Return a copy on a device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def rows(self, begin: int, end: int) -> Batch:
        """Return a range of rows."""
        return Batch(*(getattr(self, name)[begin:end] for name in self.__dataclass_fields__))


def batch_of(
    prompts: Sequence[Sequence[int]], output: RolloutOutput, advantages: torch.Tensor
) -> Batch:
    """Return the rows of a rollout.

    Args:
        prompts: the prompts that were passed to `RolloutEngine.generate`.
        output: the result of `generate`.
        advantages: the advantage of each sample.
    """
    count = len(output)
    length = max(len(prompt) for prompt in prompts) + int(output.lengths.max())
    tokens = torch.full((count, length), output.pad_token_id, dtype=torch.int64)
    mask = torch.zeros(count, length - 1)
    logprobs = torch.zeros(count, length - 1)
    for row in range(count):
        prompt = prompts[int(output.prompt_index[row])]
        begin, size = len(prompt), int(output.lengths[row])
        tokens[row, :begin] = torch.tensor(prompt)
        tokens[row, begin : begin + size] = output.token_ids[row, :size]
        mask[row, begin - 1 : begin - 1 + size] = 1
        if output.logprobs is not None:
            logprobs[row, begin - 1 : begin - 1 + size] = output.logprobs[row, :size]
    return Batch(tokens, mask, logprobs, advantages.float())
