"""Compare the decoding speed of two awake engines, one with memsaver and one without a saver.

Both engines share the GPU and have KV caches of the same size. The engines alternate, so changes in
the GPU's speed affect both engines. memsaver's engine includes the guard against requests to a
sleeping engine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import results
from engine_process import begin, decode_in_turns, wait_until_free
from libraries import OURS
from sglang_engine import BENCH, PLAIN, engine_process

from parts.sglang_tags import Cycling

METRIC = "sglang_decode_tokens_per_s"
PEER = "SGLang without a memory saver"
FRACTION = 0.4  # of the memory that is free when the engine starts
KV_TOKENS = 32768


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the row for METRIC."""
    wait_until_free(options.idle_mib)
    settings: dict[str, Any] = {"fraction": FRACTION, "tokens": KV_TOKENS}
    worker = f"{Cycling.__module__}:Cycling"
    with (
        engine_process(worker, OURS, options, backup=True, **settings) as ours,
        engine_process(worker, PLAIN, options, backup=False, **settings) as plain,
    ):
        for child in (ours, plain):
            begin(child, options)
        rates = decode_in_turns(ours, plain, options.turns)
        yield results.measurement(
            METRIC, rates[OURS], PEER, rates[PLAIN], bench=BENCH, higher_is_better=True
        )
