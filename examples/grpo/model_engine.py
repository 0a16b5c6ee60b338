"""Generate without SGLang on machines without a GPU, with a copy of the model in this process.

`ModelEngine` implements the `RolloutEngine` methods that the example uses. Because its memory is in
tags, the engine sleeps and wakes up like SGLang. The engine's weights have no backup: a sleep
discards them, and they must be updated after the wake-up. The engine is slow because it computes
every token from the beginning of the sequence. Each rank has its own engine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import memsaver
from memsaver import simulator
from memsaver.integrations.rollout import RolloutOutput, Sample
from memsaver.integrations.trainer import offload

_TAGS = {"weights": "engine weights", "kv_cache": "engine kv_cache"}
_KV_BYTES = 256 << 20  # unused; it exists only so that a sleep releases it


class ModelEngine:
    """An engine with a copy of `model`, whose weights are zeros until the first update."""

    def __init__(self, model: torch.nn.Module, pad: int, device: torch.device) -> None:
        self._model = copy.deepcopy(model).to(device).eval().requires_grad_(False)
        self._pad = pad
        self._device = device
        self._version: str | None = None
        # Without buffers: a state dict may lack them, so updates would not restore them.
        offload(list(self._model.parameters()), tag=_TAGS["weights"], backup="none").close()
        with memsaver.region(_TAGS["kv_cache"], backup="none"):
            self._kv_cache: Any = (
                simulator.buffer(_KV_BYTES)
                if simulator.active()
                else torch.empty(_KV_BYTES, dtype=torch.uint8, device=device)
            )
        with torch.no_grad():
            for tensor in self._model.state_dict().values():
                tensor.zero_()

    def sleep(self, tags: Any = None, *, wait_idle: bool = False, timeout: float = 0.0) -> Any:
        """See `RolloutEngine.sleep`; there are no requests to wait for."""
        return memsaver.pause(*_named(tags))

    def wake_up(self, tags: Any = None, *, timeout: float = 0.0) -> Any:
        """See `RolloutEngine.wake_up`."""
        return memsaver.resume(*_named(tags))

    @torch.no_grad()
    def update_weights(
        self, state: Mapping[str, torch.Tensor], version: str | None = None, **_: Any
    ) -> None:
        """Copy a state dict into the model. This is a collective operation for FSDP2 shards."""
        mine = self._model.state_dict()
        if set(mine) != set(state):
            raise memsaver.ConfigError(f"different tensors: {sorted(set(mine) ^ set(state))}")
        for name, tensor in state.items():
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            mine[name].copy_(full)
        self._version = version

    @torch.no_grad()
    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: Sequence[Mapping[str, Any]],
        **_: Any,
    ) -> RolloutOutput:
        """See `RolloutEngine.generate`; accepts a mapping of parameters for each prompt."""
        for tag in _TAGS.values():
            if memsaver.state(tag) != "mapped":
                raise memsaver.InvalidStateError(f"{tag} is {memsaver.state(tag)}", tag=tag)
        rows = [list(prompt) for prompt in input_ids]
        chances = [torch.Generator().manual_seed(p["sampling_seed"]) for p in sampling_params]
        answers: list[list[int]] = [[] for _ in rows]
        logprobs: list[list[float]] = [[] for _ in rows]
        going = list(range(len(rows)))
        while going:
            for row, probabilities in zip(going, self._predict(rows, going), strict=True):
                scaled = (probabilities / sampling_params[row]["temperature"]).log_softmax(-1)
                token = int(torch.multinomial(scaled.exp(), 1, generator=chances[row]))
                answers[row].append(token)
                logprobs[row].append(float(scaled[token]))
                rows[row].append(token)
            going = [r for r in going if not _is_over(answers[r], sampling_params[r])]
        samples = [
            Sample(
                answer,
                those,
                "stop" if answer[-1] in params["stop_token_ids"] else "length",
                self._version,
            )
            for answer, those, params in zip(answers, logprobs, sampling_params, strict=True)
        ]
        return RolloutOutput.of(samples, range(len(samples)), self._pad)

    def close(self) -> None:
        """See `RolloutEngine.close`."""

    def _predict(self, rows: list[list[int]], going: list[int]) -> torch.Tensor:
        """Return the log-probabilities of the next token of the given rows, on the CPU."""
        lengths = torch.tensor([len(rows[row]) for row in going])
        tokens = torch.full((len(going), int(lengths.max())), self._pad)
        for at, row in enumerate(going):
            tokens[at, : len(rows[row])] = torch.tensor(rows[row])
        # Tokens do not attend to the padding on their right.
        logits = self._model(input_ids=tokens.to(self._device), use_cache=False).logits
        last = logits[torch.arange(len(going)), lengths.to(logits.device) - 1]
        return last.float().cpu().log_softmax(-1)


def _is_over(answer: list[int], params: Mapping[str, Any]) -> bool:
    return answer[-1] in params["stop_token_ids"] or len(answer) >= params["max_new_tokens"]


def _named(tags: Any) -> list[str]:
    if tags is None:
        return list(_TAGS.values())
    return [_TAGS[tag] for tag in ([tags] if isinstance(tags, str) else tags)]
