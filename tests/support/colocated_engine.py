"""A fake engine in this process, with tagged memory and an output that depends on its weights."""

from typing import Any

import torch

import memsaver
from memsaver import simulator
from memsaver.errors import InvalidStateError
from memsaver.integrations.rollout import Stage

KV_BYTES = 8 << 20


class TagEngine:
    """A fake with the methods of `RolloutEngine` that a session calls, and with simulated memory.

    The weights have no backup: after a sleep, they are zeros until the next update.

    Attributes:
        heard: the names of the received calls, in order.
        fail: the exceptions that the next calls raise, keyed by the calls' names.
    """

    def __init__(self, model: torch.nn.Module, weights: str, kv_cache: str) -> None:
        self.names = {"weights": weights, "kv_cache": kv_cache}
        self.heard: list[str] = []
        self.fail: dict[str, BaseException] = {}
        self._state: dict[str, torch.Tensor] = {}
        with memsaver.region(weights):
            for name, tensor in model.state_dict().items():
                local = getattr(tensor, "_local_tensor", tensor)
                self._state[name] = simulator.empty(local.shape, local.dtype)
                self._state[name].zero_()
        with memsaver.region(kv_cache):
            self._kv = simulator.buffer(KV_BYTES)

    def sleep(self, tags: Any = None, *, wait_idle: bool, timeout: float) -> Any:
        assert wait_idle and timeout > 0
        self._hear("sleep")
        return memsaver.pause(*self._named(tags))

    def wake_up(self, tags: Any = None, *, timeout: float) -> Any:
        assert timeout > 0
        self._hear(f"wake_up {tags or 'all'}")
        return memsaver.resume(*self._named(tags))

    def update_weights(self, state: dict[str, torch.Tensor], scale: float = 1.0) -> int:
        """Return the number of tensors in the update."""
        self._need("weights")
        for number, (name, tensor) in enumerate(state.items()):
            if number == 1:
                self._hear("update_weights")  # if this raises, one tensor is already updated
            local = getattr(tensor, "_local_tensor", tensor)
            self._state[name].copy_(local.detach() * scale)
        return len(state)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        self._need("weights", "kv_cache")
        out = x
        for tensor in self._state.values():
            out = out + tensor.double().sum().float()
        return out

    @property
    def weights(self) -> list[bytes]:
        self._need("weights")
        return [t.contiguous().view(torch.uint8).numpy().tobytes() for t in self._state.values()]

    def _hear(self, call: str) -> None:
        self.heard.append(call)
        error = self.fail.pop(call, None)
        if error is not None:
            raise error

    def _named(self, tags: Any) -> list[str]:
        return [self.names[tags]] if tags else list(self.names.values())

    def _need(self, *tags: str) -> None:
        for tag in tags:
            if memsaver.state(self.names[tag]) != "mapped":
                raise InvalidStateError(f"{tag} is released", tag=tag)


def stages_of(session: Any) -> list[Stage]:
    return [report.stage for report in session.stages]
