"""GRPO's advantages: how much better an answer is than others to the same problem."""

from __future__ import annotations

import torch

_LEAST = 1e-6  # of a deviation: groups whose answers are all worth the same teach nothing


def group_advantages(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Each reward less the mean of its group, in the group's standard deviations.

    Args:
        rewards: [groups * samples], the samples of a group one after the other.
        samples: how many a group has.
    """
    groups = rewards.reshape(-1, samples).double()
    centred = groups - groups.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    scaled = torch.where(deviation > _LEAST, centred / deviation.clamp(min=_LEAST), 0.0)
    return scaled.reshape(-1).to(rewards.dtype)
