"""Converts a rollout's requests to SGLang's format, and SGLang's outputs to samples."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from memsaver._runtime.redaction import redacted
from memsaver._runtime.text import plain_text
from memsaver.errors import ConfigError

from ..engine.errors import EngineError
from ..engine.fields import encodable, is_whole
from ..engine.interface import Request, Sample

__all__ = ["payload_of", "sample_of", "samples_of"]

# Parts of a prompt other than tokens, as `GenerateReqInput` names them.
_MULTIMODAL = ("image_data", "video_data", "audio_data")


def payload_of(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the fields of one `GenerateReqInput` for the requests, with ids to abort them."""
    name = f"memsaver-{uuid.uuid4().hex}"
    payload: dict[str, Any] = {
        "rid": [f"{name}-{number}" for number in range(len(requests))],
        "sampling_params": [dict(request.sampling_params) for request in requests],
        "return_logprob": True,
    }
    texts = [request.text for request in requests if request.text is not None]
    if not texts:
        payload["input_ids"] = [list(request.input_ids) for request in requests]
    elif len(texts) == len(requests):
        payload["text"] = texts
    else:
        raise ConfigError(
            "some ranks pass texts as prompts, and others token ids: SGLang accepts only one kind "
            "in a call"
        )
    named = {key for request in requests for key in request.multimodal or ()}
    if unknown := sorted(named.difference(_MULTIMODAL), key=repr):
        raise ConfigError(
            f"SGLang does not support {unknown[0]!r} in a prompt; it supports "
            f"{', '.join(_MULTIMODAL)}"
        )
    for key in _MULTIMODAL:
        if key in named:
            values = [(request.multimodal or {}).get(key) for request in requests]
            # For images, SGLang expects a list per prompt, and detects that from the first prompt.
            payload[key] = [_as_list(one) for one in values] if key == "image_data" else values
    return payload


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def samples_of(outputs: Any) -> list[Sample]:
    """Return the samples in SGLang's outputs. Raises `EngineError` if their format is invalid."""
    if not isinstance(outputs, list):
        raise EngineError(f"the engine must return a list of samples, not {_excerpt(outputs)!r}")
    return [sample_of(output) for output in outputs]


def sample_of(output: Mapping[str, Any]) -> Sample:
    """Return the sample in one of SGLang's outputs. Raises like `samples_of`."""
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
            raise TypeError("output_ids must be a list of integers")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(
            f"the engine's output does not have SGLang's format ({type(error).__name__}: {error}): "
            f"{_excerpt(output)}"
        ) from error
    if logprobs is not None and len(logprobs) != len(tokens):
        if finish != "abort":
            raise EngineError(
                f"the engine returned {len(logprobs)} log-probabilities for {len(tokens)} tokens"
            )
        both = min(len(logprobs), len(tokens))  # the abort separated the two lists
        tokens, logprobs = tokens[:both], logprobs[:both]
    return Sample(
        tokens, logprobs, encodable(finish), None if version is None else encodable(str(version))
    )


def _excerpt(value: Any) -> str:
    return plain_text(redacted(str(value)))[:200]


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, float) or is_whole(value):
        return float(value)
    raise TypeError(f"a log-probability must be a number, not {type(value).__name__}")
