"""Compute GRPO's advantages: an answer's value relative to other answers to the same problem."""

from __future__ import annotations

import torch

_LEAST = 1e-6  # the minimum deviation: a group with equal rewards has no advantages


def group_advantages(rewards: torch.Tensor, samples: int) -> torch.Tensor:
    """Return each reward minus the mean of its group, divided by the group's standard deviation.

    Args:
        rewards: [groups * samples], with a group's samples adjacent.
        samples: the number of samples in a group.
    """
    groups = rewards.reshape(-1, samples).double()
    centred = groups - groups.mean(1, keepdim=True)
    deviation = centred.square().mean(1, keepdim=True).sqrt()
    scaled = torch.where(deviation > _LEAST, centred / deviation.clamp(min=_LEAST), 0.0)
    return scaled.reshape(-1).to(rewards.dtype)
