"""Compare decoding by two awake vLLM engines, one with memsaver, one with vLLM's own allocator.

Both engines share the GPU and alternate, so changes in the GPU's speed affect both engines.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import results
from engine_process import begin, decode_in_turns, wait_until_free
from libraries import OURS
from vllm_engine import BENCH, PEER, THEIRS, engine_process, prefix

FRACTION = 0.4  # of the GPU's memory


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the row for decoding."""
    wait_until_free(options.idle_mib)
    with (
        engine_process(OURS, options, FRACTION) as ours,
        engine_process(THEIRS, options, FRACTION) as theirs,
    ):
        for child in (ours, theirs):
            begin(child, options)
        rates = decode_in_turns(ours, theirs, options.turns)
    yield results.measurement(
        f"{prefix(options)}decode_tokens_per_s",
        rates[OURS],
        PEER,
        rates[THEIRS],
        bench=BENCH,
        higher_is_better=True,
    )
