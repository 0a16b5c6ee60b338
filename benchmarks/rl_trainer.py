"""A trainer next to an engine; its weights and optimizer states are in two tags of a saver.

Both tags have a backup in host memory. With memsaver, `offload` moves weights and states into the
tags. With torch_memory_saver, weights and states are created in regions, as is usual for this
library. Gradients exist only during a step. Importing this module imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import libraries
import torch
import workloads
from engine_model import Shape, checkpoint

WEIGHTS, OPTIMIZER = "trainer_weights", "trainer_optimizer"

BATCH = 4096  # tokens for which a trainer computes gradients at once


class Averages(torch.optim.Optimizer):
    """An optimizer with `count` running averages of the gradients, each as large as the parameters.

    Adam has two. All kernels work in place.
    """

    def __init__(self, parameters: Iterable[Any], count: int) -> None:
        super().__init__(parameters, {"count": count})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                averages = self.state[parameter]
                for number in range(group["count"]):
                    key = f"average_{number}"
                    if key not in averages:
                        averages[key] = torch.zeros_like(parameter)
                    averages[key].lerp_(parameter.grad, 1 / (number + 2))
                    parameter.add_(averages[key], alpha=-0.1)


class Saver(Protocol):
    """The calls with which a library manages a trainer's memory."""

    def hold_weights(self, make: Callable[[], Any]) -> Any:
        """Call `make` to create a module, and put its parameters in the tag WEIGHTS."""

    def hold_states(self, optimizer: Any, first_step: Callable[[], None]) -> None:
        """Run the first step, and put the new optimizer states in the tag OPTIMIZER."""

    def pause(self, tag: str) -> None:
        """Release the tag's memory."""

    def resume(self, *tags: str) -> None:
        """Map the tags' memory again."""

    def begin_resume(self) -> None:
        """Resume the weights and then the states, in the background if the library supports it."""

    def begin_pause(self, tag: str) -> None:
        """Begin to pause a tag, if the library supports background pauses."""

    def finish_pause(self) -> None:
        """Wait until the background pause ends."""


class Offloads:
    """memsaver.integrations.trainer."""

    def __init__(self) -> None:
        import memsaver
        from memsaver.integrations.trainer import offload

        self._memsaver = memsaver
        self._offload = offload
        self._weights: Any = None
        self._states: Any = None
        self._pause: Any = None

    def hold_weights(self, make: Callable[[], Any]) -> Any:
        module = make()
        self._weights = self._offload(module, tag=WEIGHTS, by_layer=True)
        return module

    def hold_states(self, optimizer: Any, first_step: Callable[[], None]) -> None:
        self._states = self._offload(optimizer, tag=OPTIMIZER)
        first_step()

    def pause(self, tag: str) -> None:
        self._memsaver.pause(tag)

    def resume(self, *tags: str) -> None:
        self._memsaver.resume(*tags)

    def begin_resume(self) -> None:
        self._weights.resume(wait=False)
        self._states.resume(wait=False)

    def begin_pause(self, tag: str) -> None:
        self._pause = self._memsaver.pause(tag, wait=False)

    def finish_pause(self) -> None:
        self._pause.wait()


class Regions:
    """The library torch_memory_saver, in which allocations inside a region belong to its tag."""

    def __init__(self, name: str) -> None:
        self._library = libraries.open_library(name)

    def hold_weights(self, make: Callable[[], Any]) -> Any:
        with self._library.region(WEIGHTS, "host"):
            return make()

    def hold_states(self, optimizer: Any, first_step: Callable[[], None]) -> None:
        with self._library.region(OPTIMIZER, "host"):
            first_step()

    def pause(self, tag: str) -> None:
        self._library.pause(tag)

    def resume(self, *tags: str) -> None:
        for tag in tags:
            self._library.resume(tag)

    def begin_resume(self) -> None:
        self.resume(WEIGHTS, OPTIMIZER)

    def begin_pause(self, tag: str) -> None:
        self._library.pause(tag)

    def finish_pause(self) -> None:
        pass


class Trainer:
    """A bfloat16 copy of a model's weights, and their optimizer. Created awake.

    Args:
        name: the name of the trainer's memory saver.
        states: the number of optimizer states for each weight.
        device: the torch device; "cpu" with memsaver's simulated driver.
        seed: the seed of the initial weights.
    """

    def __init__(self, name: str, shape: Shape, states: int, device: str, seed: int = 0) -> None:
        self._device = device
        saver: Saver = Offloads() if name == libraries.OURS else Regions(name)
        self._saver = saver
        self._names = [key for key, _ in checkpoint(shape)]
        torch.manual_seed(seed)
        self._model = saver.hold_weights(lambda: _module(shape, device))
        self._optimizer = Averages(self._model.parameters(), states)
        self._make_gradients(seed + 1)
        saver.hold_states(self._optimizer, self._optimizer.step)
        self._let_gradients_go()
        self._sums: Any = None
        self.remember()

    @property
    def weights(self) -> list[tuple[str, Any]]:
        """Return the weights with their names in checkpoints."""
        return [
            (name, parameter.detach())
            for name, parameter in zip(self._names, self._model.parameters(), strict=True)
        ]

    @property
    def bytes(self) -> int:
        """Return the size of the weights and of the optimizer's states."""
        return sum(int(tensor.nbytes) for tensor in self._tensors())

    def train(self, seed: int) -> None:
        """Run a step with gradients that are determined by the seed."""
        self._make_gradients(seed)
        self._optimizer.step()
        self._let_gradients_go()

    def learn(self, seed: int, tokens: int) -> float:
        """Run a step with the gradients of a loss, and return the loss.

        Each layer multiplies `tokens` random inputs, in batches. The loss is the mean square of the
        outputs. A layer needs only its own weights, and only the optimizer's step needs the states.
        """
        torch.manual_seed(seed)
        batches = max(1, tokens // BATCH)
        total = torch.zeros((), device=self._device)
        for _ in range(batches):
            for layer in self._model:
                weight = layer.weight
                size = (min(tokens, BATCH), weight.shape[-1])
                inputs = torch.randn(size, dtype=weight.dtype, device=self._device)
                loss = layer(inputs).square().mean(dtype=torch.float32) / batches
                loss.backward()
                total += loss.detach()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total)

    def wake_overlapped(self) -> None:
        """Begin to resume the weights and the states, if the library supports it."""
        self._saver.begin_resume()

    def begin_optimizer_sleep(self) -> None:
        """Begin `sleep_optimizer`, if the library supports background pauses."""
        if self._device == "cuda":
            torch.cuda.empty_cache()
        self._saver.begin_pause(OPTIMIZER)

    def finish_optimizer_sleep(self) -> None:
        """Wait until the background pause ends."""
        self._saver.finish_pause()

    def sleep_optimizer(self) -> None:
        """Release the optimizer's memory, and the memory of gradients in torch's cache."""
        if self._device == "cuda":
            torch.cuda.empty_cache()
        self._saver.pause(OPTIMIZER)

    def sleep_weights(self) -> None:
        """Release the weights' memory."""
        self._saver.pause(WEIGHTS)

    def wake(self) -> None:
        """Resume both tags."""
        self._saver.resume(WEIGHTS, OPTIMIZER)

    def digest(self) -> str:
        """Return a checksum of all contents."""
        return hashlib.sha256(workloads.sums(self._tensors()).numpy().tobytes()).hexdigest()

    def remember(self) -> None:
        """Record all contents, for `lost`."""
        self._sums = workloads.sums(self._tensors())

    def lost(self) -> str:
        """Describe the contents that differ from the record; "" if no contents differ."""
        wrong = int((workloads.sums(self._tensors()) != self._sums).sum())
        return f"{wrong} of {len(self._sums)} pieces of the trainer's memory" if wrong else ""

    def synchronise(self) -> None:
        """Wait until the device has finished this process's work."""
        if self._device == "cuda":
            torch.cuda.synchronize()

    def finish_writes(self) -> None:
        """Wait for the current stream's work, such as copies into a bucket."""
        if self._device == "cuda":
            torch.cuda.current_stream().synchronize()

    def _make_gradients(self, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in self._model.parameters():
            parameter.grad = torch.empty_like(parameter).normal_(0.0, 0.01)

    def _let_gradients_go(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self.synchronise()

    def _tensors(self) -> list[Any]:
        found = [tensor for _, tensor in self.weights]
        for averages in self._optimizer.state.values():
            found += averages.values()
        return found


class Layer(torch.nn.Module):
    """Multiplies inputs by a random matrix (values near 0), or elementwise by a vector (near 1)."""

    def __init__(self, size: tuple[int, ...], device: str) -> None:
        super().__init__()
        weight = torch.empty(size, dtype=torch.bfloat16, device=device)
        self.weight = torch.nn.Parameter(weight.normal_(1.0 if len(size) == 1 else 0.0, 0.02))

    def forward(self, inputs: Any) -> Any:
        return inputs @ self.weight.T if self.weight.dim() > 1 else inputs * self.weight


def _module(shape: Shape, device: str) -> Any:
    """Create a layer for each weight, in the order of `checkpoint`."""
    return torch.nn.ModuleList(Layer(size, device) for _, size in checkpoint(shape))
