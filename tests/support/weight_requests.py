"""Weight-update requests to the fake engine of `weight_engine`."""

from __future__ import annotations

import weight_buckets
from weight_engine import Request, checkpoint

from memsaver.integrations.engine.weights.checks import VerificationRequest
from memsaver.integrations.engine.weights.digests import digest
from memsaver.integrations.sglang.protocol import text_of


def weights():
    named = checkpoint()
    del named["lm_head.weight"]
    return named


def payload(named, load_format="flattened_bucket"):
    text, payload.kept = weight_buckets.payload(named, as_list=load_format == "direct")
    return text


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
