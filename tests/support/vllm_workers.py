"""A one-rank vLLM worker in this process, with a small model of torch modules.

The module requires tests/fixtures/vllm_engine on the search path.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch
from weight_buckets import payload

from memsaver.integrations.engine.interface import SharedTensors, WeightLoad
from memsaver.integrations.engine.weights.checks import RankCheck, VerificationRequest
from memsaver.integrations.engine.weights.digests import digest
from memsaver.integrations.vllm import protocol, weight_loads


class Worker:
    """Calls to the plugin's methods, with arguments and results converted to JSON and back."""

    def __init__(self, model) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.vllm_config = SimpleNamespace()
        self.parallel_config = SimpleNamespace(world_size=1)
        self.model_config, self.device = SimpleNamespace(dtype=torch.float32), "cpu"

    def call(self, method: str, *arguments) -> RankCheck:
        """Call a method and return the only rank's check."""
        rows = getattr(self, method)(*json.loads(json.dumps(arguments)))
        [check] = [RankCheck.from_fields(row) for row in json.loads(json.dumps(rows))]
        return check

    def load(self, named, layout="whole") -> RankCheck:
        """Load a bucket with full verification."""
        row = tuple(digest(tensor) for tensor in named.values())
        verification = VerificationRequest(tuple(named), tuple(range(len(named))), (row,))
        text, memory = payload(named, as_list=layout == "engine")
        given = WeightLoad(SharedTensors((text,), layout), 10.0, verification=verification)
        check = self.call(protocol.LOAD, protocol.fields_of(given))
        memory.fill_(255)  # the sender uses its memory for the next bucket
        return check


weight_loads.install(Worker)


def contents(model) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def buckets(named, count: int) -> list[dict[str, torch.Tensor]]:
    """Divide tensors into buckets that cross layer boundaries."""
    names = list(named)
    size = -(-len(names) // count)
    groups = (names[at : at + size] for at in range(0, len(names), size))
    return [{name: named[name] for name in group} for group in groups]
