"""A rollout's requests as SGLang takes them, and its outputs as samples."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from memsaver.errors import ConfigError
from memsaver.integrations.rollout.backend import Request, Sample
from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.fields import encodable, is_whole
from memsaver.redaction import redacted
from memsaver.text import plain_text

__all__ = ["payload_of", "sample_of"]

# What a prompt may have beside its tokens, as `GenerateReqInput` names it.
_MULTIMODAL = ("image_data", "video_data", "audio_data")


def payload_of(requests: Sequence[Request]) -> dict[str, Any]:
    """The requests as fields of one `GenerateReqInput`, with ids by which they can be aborted."""
    name = f"memsaver-{uuid.uuid4().hex}"
    payload: dict[str, Any] = {
        "rid": [f"{name}-{number}" for number in range(len(requests))],
        "input_ids": [list(request.input_ids) for request in requests],
        "sampling_params": [dict(request.sampling_params) for request in requests],
        "return_logprob": True,
    }
    named = {key for request in requests for key in request.multimodal or ()}
    if unknown := sorted(named.difference(_MULTIMODAL), key=repr):
        raise ConfigError(
            f"SGLang knows no {unknown[0]!r} of a prompt; it takes {', '.join(_MULTIMODAL)}"
        )
    for key in _MULTIMODAL:
        if key in named:
            values = [(request.multimodal or {}).get(key) for request in requests]
            # Of images it takes a list for each prompt, and tells so by the first one.
            payload[key] = [_as_list(one) for one in values] if key == "image_data" else values
    return payload


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def sample_of(output: Mapping[str, Any]) -> Sample:
    """One of SGLang's outputs."""
    try:
        tokens = list(output["output_ids"])
        meta = output["meta_info"]
        reason = meta.get("finish_reason") or {}
        finish = str(reason["type"]) if isinstance(reason, Mapping) and reason else str(reason)
        entries = meta.get("output_token_logprobs")
        if entries is None and not tokens:  # a request that was aborted before it began
            entries = []
        logprobs = None if entries is None else [_number(entry[0]) for entry in entries]
        version = meta.get("weight_version")
        if not all(map(is_whole, tokens)):
            raise TypeError("output_ids must be a list of whole numbers")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"the engine's output is not one of SGLang's ({type(error).__name__}: {error}): "
            f"{plain_text(redacted(str(output)))[:200]}"
        ) from error
    if logprobs is not None and len(logprobs) != len(tokens):
        if finish != "abort":
            raise EngineError(
                f"the engine returned {len(logprobs)} log-probabilities for {len(tokens)} tokens"
            )
        both = min(len(logprobs), len(tokens))  # the abort came between the two
        tokens, logprobs = tokens[:both], logprobs[:both]
    return Sample(
        tokens, logprobs, encodable(finish), None if version is None else encodable(str(version))
    )


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, float) or is_whole(value):
        return float(value)
    raise TypeError(f"a log-probability must be a number, not {type(value).__name__}")
