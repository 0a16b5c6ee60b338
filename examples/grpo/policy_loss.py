"""The policy loss: the clipped surrogate of PPO and GRPO."""

from __future__ import annotations

import torch


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probability of each token except the first, float32 [rows, length - 1].

    Args:
        logits: [rows, length, vocabulary]; the logits at a position predict the next token.
        tokens: [rows, length].
        temperature: the sampling temperature, which is part of the sampled policy.
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
    """Return the contribution of some rows to the mean loss over `total` tokens.

    Args:
        logprobs: [rows, tokens], of the policy that is trained.
        old_logprobs: the same for the policy that generated the answers.
        advantages: [rows].
        mask: [rows, tokens], 1 for a token of the answer.
        clip: the ratio of probabilities is clipped to the range from 1 - clip to 1 + clip.
        total: the number of tokens in all rows on all ranks. The sum of the results therefore does
            not depend on the division into rows and ranks.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    gain = advantages[:, None]
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return -(surrogate * mask).sum() / total
