"""Requests that load weights into the fake engine of `weight_engine`."""

from __future__ import annotations

import torch
from weight_engine import Request, checkpoint

from memsaver.integrations.engine.weights.checks import VerificationRequest
from memsaver.integrations.engine.weights.digests import digest
from memsaver.integrations.rollout.weights.payloads import flattened, listed
from memsaver.integrations.sglang.protocol import text_of


def weights():
    named = checkpoint()
    del named["lm_head.weight"]
    return named


def payload(named, load_format="flattened_bucket"):
    memory = torch.zeros(sum(512 + t.nbytes for t in named.values()), dtype=torch.uint8)
    views, begin = [], 0
    for name, tensor in named.items():
        begin = -(-begin // 512) * 512
        view = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        views.append((name, begin, view))
        begin += tensor.nbytes
    payload.kept = memory  # must exist while it is opened
    return listed(views) if load_format == "direct" else flattened(memory, views)


def verification(named, places=None, sent=None):
    names = tuple(named)
    places = tuple(range(len(names))) if places is None else places
    row = tuple(digest((sent or named)[names[at]]) for at in places)
    return VerificationRequest(names, places, (row,))


def load(rank, named, wanted, load_format="flattened_bucket", **fields):
    request = Request(
        text_of(wanted) if wanted else None,
        [payload(named, load_format)],
        load_format=load_format,
        **fields,
    )
    return rank.update_weights_from_tensor(request)
