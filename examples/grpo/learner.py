"""Run a training step on a rollout, on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from batches import Batch
from policy_loss import clipped_loss, token_logprobs
from settings import Settings

_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class Learned:
    """The metrics of a training step, over all ranks.

    Attributes:
        loss: the loss of the last pass.
        gradient: the norm of its gradient before clipping.
        gap: the mean difference between the engine's and the trainer's log-probabilities of the
            sampled tokens before the step; small if the engine has the trainer's weights.
    """

    loss: float
    gradient: float
    gap: float


class Learner:
    """Trains a model on rollouts. On several ranks, FSDP2 shards the model."""

    def __init__(self, model: Any, settings: Settings, device: torch.device) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._settings = settings
        self._device = device
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1

    def learn(self, batch: Batch) -> Learned:
        """Run the optimizer steps for a rollout. A collective."""
        batch = batch.to(self._device)
        total = self._sum(batch.mask.sum())
        old, gap = self._old_logprobs(batch, total)
        loss = norm = 0.0
        for _ in range(self._settings.passes):
            loss, norm = self._pass(batch, old, total)
        return Learned(loss, norm, gap)

    def _pass(self, batch: Batch, old: torch.Tensor, total: float) -> tuple[float, float]:
        loss = torch.zeros((), device=self._device)
        for begin, rows in self._parts(batch):
            logprobs = self._logprobs(rows)
            part = clipped_loss(
                logprobs,
                old[begin : begin + len(rows.tokens)],
                rows.advantages,
                rows.mask,
                self._settings.clip,
                total,
            )
            (part * self._ranks).backward()  # because FSDP averages gradients over the ranks
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), _LARGEST_GRADIENT)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # so that a pause has no gradients to save
        return self._sum(loss), float(norm)

    @torch.no_grad()
    def _old_logprobs(self, batch: Batch, total: float) -> tuple[torch.Tensor, float]:
        parts = [self._logprobs(rows) for _, rows in self._parts(batch)]
        old = torch.cat(parts)
        difference = ((old - batch.engine_logprobs).abs() * batch.mask).sum()
        return old, self._sum(difference) / total

    def _logprobs(self, rows: Batch) -> torch.Tensor:
        on_gpu = self._device.type == "cuda"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=on_gpu):
            logits = self.model(input_ids=rows.tokens, use_cache=False).logits
        return token_logprobs(logits, rows.tokens, self._settings.temperature)

    def _parts(self, batch: Batch) -> list[tuple[int, Batch]]:
        """Split a batch into parts for one forward pass each."""
        size = self._settings.rows
        return [(at, batch.rows(at, at + size)) for at in range(0, len(batch.tokens), size)]

    def _sum(self, value: torch.Tensor) -> float:
        value = value.detach().double()
        if self._ranks > 1:
            dist.all_reduce(value)
        return float(value)
