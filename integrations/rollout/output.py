"""`RolloutOutput`: the samples of a rollout, as tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine.errors import EngineError
from ..engine.fields import is_whole
from ..engine.interface import Sample

if TYPE_CHECKING:
    import torch

__all__ = ["RolloutOutput", "check_samples"]


def check_samples(samples: Any, count: int) -> list[Sample]:
    """Return an engine's samples for `count` requests; raise `EngineError` for invalid samples."""
    several = list(samples) if isinstance(samples, Iterable) else None
    if several is None or not all(isinstance(one, Sample) for one in several):
        raise EngineError(
            f"the engine must return a list of samples, not a {type(samples).__name__}"
        )
    if len(several) != count:
        raise EngineError(f"the engine returned {len(several)} samples for {count} requests")
    for number, one in enumerate(several):
        if not isinstance(one.token_ids, Sequence) or not all(map(is_whole, one.token_ids)):
            raise EngineError(f"the engine returned tokens of sample {number} that are not numbers")
        if one.logprobs is not None and not all(map(_is_real, one.logprobs)):
            raise EngineError(
                f"the engine returned log-probabilities of sample {number} that are not numbers"
            )
        if one.logprobs is not None and len(one.logprobs) != len(one.token_ids):
            raise EngineError(
                f"the engine returned {len(one.logprobs)} log-probabilities for the "
                f"{len(one.token_ids)} tokens of sample {number}"
            )
    return several


def _is_real(value: object) -> bool:
    return isinstance(value, float) or is_whole(value)  # the engine reports unknown values as NaN


@dataclass(frozen=True, eq=False)
class RolloutOutput:
    """The samples for a batch of prompts, as CPU tensors with one row for each sample.

    Each row contains the tokens of a sample without its prompt, padded on the right. The samples of
    a prompt are in adjacent rows, in the order of the prompts.

    Attributes:
        token_ids: int64 [n, longest]: the tokens, padded with `pad_token_id`.
        attention_mask: int64 [n, longest]: 1 for a token, 0 for padding.
        logprobs: float32 [n, longest]: the log-probability of each sampled token; 0 for padding.
            The attribute is None if the engine reports no log-probabilities.
        lengths: int64 [n]: the number of tokens of each sample.
        prompt_index: int64 [n]: the index of each sample's prompt among this rank's prompts.
        finish_reasons: for each sample, "stop", "length", or "abort" if the sample was stopped
            early.
        weight_version: the version of the weights when the samples ended; None if the engine
            reports no version, or if the samples' versions differ.
        pad_token_id: the token that is used for padding.
    """

    token_ids: torch.Tensor
    attention_mask: torch.Tensor
    logprobs: torch.Tensor | None
    lengths: torch.Tensor
    prompt_index: torch.Tensor
    finish_reasons: tuple[str, ...]
    weight_version: str | None
    pad_token_id: int = 0

    def __len__(self) -> int:
        return len(self.finish_reasons)

    @classmethod
    def of(
        cls, samples: Sequence[Sample], prompt_index: Sequence[int], pad_token_id: int = 0
    ) -> RolloutOutput:
        """Return the samples as tensors.

        Args:
            samples: the samples, in the order of the rows.
            prompt_index: the index of each sample's prompt.
            pad_token_id: the token that is used for padding.
        """
        import torch

        count, longest = len(samples), max((len(s.token_ids) for s in samples), default=0)
        token_ids = torch.full((count, longest), pad_token_id, dtype=torch.int64)
        mask = torch.zeros((count, longest), dtype=torch.int64)
        with_logprobs = all(sample.logprobs is not None for sample in samples)
        logprobs = torch.zeros((count, longest), dtype=torch.float32) if with_logprobs else None
        for row, sample in enumerate(samples):
            length = len(sample.token_ids)
            token_ids[row, :length] = torch.tensor(sample.token_ids, dtype=torch.int64)
            mask[row, :length] = 1
            if logprobs is not None:
                logprobs[row, :length] = torch.tensor(sample.logprobs, dtype=torch.float32)
        versions = {sample.weight_version for sample in samples}
        return cls(
            token_ids,
            mask,
            logprobs,
            mask.sum(1),
            torch.tensor(list(prompt_index), dtype=torch.int64),
            tuple(sample.finish_reason for sample in samples),
            versions.pop() if len(versions) == 1 else None,
            pad_token_id,
        )
