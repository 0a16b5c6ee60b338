"""The loss of a policy's tokens: the clipped surrogate of PPO and GRPO."""

from __future__ import annotations

import torch


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """The log-probability of each token but the first, float32 [rows, length - 1].

    Args:
        logits: [rows, length, vocabulary], of which those before a token predict it.
        tokens: [rows, length].
        temperature: of the sampling, which belongs to the policy that answers.
    """
    predictions = torch.log_softmax(logits[:, :-1].float() / temperature, -1)
    return predictions.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def clipped_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    clip: float,
    total: float,
) -> torch.Tensor:
    """The loss of some rows, as their part of the mean over `total` tokens.

    Args:
        logprobs: [rows, tokens], of the policy that learns.
        old_logprobs: likewise, of the policy that answered.
        advantages: [rows].
        mask: [rows, tokens], 1 for a token of the answer.
        clip: ratios count between 1 - clip and 1 + clip.
        total: the tokens of all rows on all ranks, so that rows count alike however they are split.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    gain = advantages[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return -(surrogate * mask).sum() / total
