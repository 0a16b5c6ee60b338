"""Small trainers whose steps depend only on the step number, so their results can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

import memsaver
from memsaver.integrations.trainer import Offloaded

torch.set_num_threads(1)  # small products are slower with several threads

# Optimizer factories by name. Together, they have every kind of state in torch's optimizers.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),  # states from the beginning
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=3),  # lists of tensors
}


class Trainer:
    """A model and its optimizer."""

    def __init__(
        self,
        optimizer: str = "adamw",
        model: Callable[[], torch.nn.Module] | None = None,
        device: str = "cpu",
        accumulate: bool = False,
    ) -> None:
        torch.manual_seed(7)
        self.model = (model or plain_model)().to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.device = device
        self.accumulate = accumulate
        self.done = 0

    def backward(self, to: int = 0) -> torch.Tensor:
        """Accumulate a gradient for inputs that depend on the step and `to`."""
        generator = torch.Generator().manual_seed(100 * self.done + to)
        x = torch.randn(4, 32, generator=generator).to(self.device)
        loss = self.model(x).square().mean()
        loss.backward()
        return loss

    def step(self, between: Callable[[], object] = lambda: None) -> None:
        """Run a step; call `between` while gradients exist."""
        if not self.accumulate or self.done % 2 == 0:
            self.optimizer.zero_grad(set_to_none=self.done % 3 > 0)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            between()
            self.optimizer.step(lambda: (self.optimizer.zero_grad(), self.backward())[1])
        else:
            self.backward(0)
            between()
            self.backward(1)
            between()
            if not self.accumulate or self.done % 2:
                self.optimizer.step()
        self.done += 1

    def contents(self) -> list[bytes]:
        """Return the bytes of the parameters, gradients and optimizer states."""
        tensors = list(self.model.state_dict().values())
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        return [bytes_of(tensor) for tensor in [*tensors, *states_of(self.optimizer)]]


def plain_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(32, 48), torch.nn.LayerNorm(48), torch.nn.ReLU(), torch.nn.Linear(48, 8)
    )


def step_all(*trainers: Any) -> None:
    for trainer in trainers:
        trainer.step()


def zero_grad_all(*trainers: Any) -> None:
    for trainer in trainers:
        trainer.optimizer.zero_grad()


def pause_and_resume(offloaded: Offloaded) -> None:
    with offloaded.paused():
        pass


def assert_same_steps(trainer: Any, expected: Any, offloaded: Offloaded, steps: int = 6) -> None:
    """Check that a trainer with pauses between steps has the same results as another trainer."""
    for number in range(steps):
        step_all(trainer, expected)
        pause_and_resume(offloaded)
        assert trainer.contents() == expected.contents(), number


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all tensors in an optimizer's states, including step counters."""

    def walk(value: Any) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            for inner in value.values():
                yield from walk(inner)
        elif isinstance(value, list | tuple):
            for inner in value:
                yield from walk(inner)

    return list(walk(list(optimizer.state.values())))


def addresses_of(trainer: Trainer) -> list[int]:
    """Return the addresses of the parameters and optimizer states."""
    return [t.data_ptr() for t in [*trainer.model.parameters(), *states_of(trainer.optimizer)]]


def lies_in(tensor: torch.Tensor, tag: str) -> bool:
    """Return whether a tensor's memory belongs to the tag, regardless of the tag's state."""
    found = memsaver.explain(getattr(tensor.detach(), "_local_tensor", tensor))
    return found is not None and found.tag == tag


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements as bytes."""
    local = getattr(tensor.detach(), "_local_tensor", tensor.detach())
    flat = local.cpu().contiguous().reshape(-1)
    assert flat.numel() == math.prod(local.shape)
    return flat.view(torch.uint8).numpy().tobytes()
