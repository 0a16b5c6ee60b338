"""A rollout as rows to learn from: each prompt with its answer, padded on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from memsaver.integrations.rollout import RolloutOutput


@dataclass(frozen=True)
class Batch:
    """Rows of this rank.

    Attributes:
        tokens: int64 [rows, length]: prompt, answer, padding.
        mask: float32 [rows, length - 1]: 1 where the next token is one of the answer's.
        engine_logprobs: float32 likewise: what the engine sampled them with; 0 elsewhere.
        advantages: float32 [rows].
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))

    def rows(self, begin: int, end: int) -> Batch:
        """Some of them."""
        return Batch(*(getattr(self, name)[begin:end] for name in self.__dataclass_fields__))


def batch_of(
    prompts: Sequence[Sequence[int]], output: RolloutOutput, advantages: torch.Tensor
) -> Batch:
    """The rows of a rollout.

    Args:
        prompts: as they were given to `RolloutEngine.generate`.
        output: what it gave.
        advantages: of each of its samples.
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
