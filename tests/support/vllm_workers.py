"""A vLLM worker of one rank with a small model of torch's modules, in this process.

Needs tests/fixtures/vllm_engine on the path.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from memsaver.integrations.engine.interface import SharedTensors, WeightLoad
from memsaver.integrations.engine.weights.checks import RankCheck, VerificationRequest
from memsaver.integrations.engine.weights.digests import digest
from memsaver.integrations.rollout.weights.payloads import flattened, listed
from memsaver.integrations.vllm import protocol, weight_loads


class Worker:
    """Calls of the plugin's methods, with arguments and results that went through JSON."""

    def __init__(self, model) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.parallel_config = SimpleNamespace(world_size=1)
        self.model_config, self.device = SimpleNamespace(dtype=torch.float32), "cpu"

    def call(self, method: str, *arguments) -> RankCheck:
        """Call a method, and return the check of the only rank."""
        rows = getattr(self, method)(*json.loads(json.dumps(arguments)))
        [check] = [RankCheck.from_fields(row) for row in json.loads(json.dumps(rows))]
        return check

    def load(self, named, layout="whole", sent=None, text=None, **fields) -> RankCheck:
        """Load a bucket with full verification.

        `sent` are the tensors of the digests, and `text` a payload in place of a bucket's.
        """
        names = tuple(named)
        row = tuple(digest((sent or named)[name]) for name in names)
        verification = VerificationRequest(names, tuple(range(len(names))), (row,))
        own, memory = payload(named, layout)
        text = text or own
        given = WeightLoad(SharedTensors((text,), layout), 10.0, verification=verification)
        check = self.call(protocol.LOAD, {**protocol.fields_of(given), **fields})
        memory.fill_(255)  # the sender uses its memory for the next bucket
        return check


weight_loads.install(Worker)


def payload(named, layout="whole"):
    """Return the text of a bucket, and its memory."""
    memory = torch.zeros(sum(512 + t.nbytes for t in named.values()), dtype=torch.uint8)
    memory.share_memory_()
    views, begin = [], 0
    for name, tensor in named.items():
        begin = -(-begin // 512) * 512
        view = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        views.append((name, begin, view))
        begin += tensor.nbytes
    return (listed(views) if layout == "engine" else flattened(memory, views)), memory


def contents(model) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def equal(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def buckets(named, count: int) -> list[dict[str, torch.Tensor]]:
    """Divide tensors into buckets, across the layers' borders."""
    names = list(named)
    size = -(-len(names) // count)
    groups = (names[at : at + size] for at in range(0, len(names), size))
    return [{name: named[name] for name in group} for group in groups]
