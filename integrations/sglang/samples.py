"""Converts a rollout's requests to SGLang's format, and SGLang's outputs to samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memsaver.errors import ConfigError

from ..engine.errors import EngineError
from ..engine.interface import Request, Sample
from ..engine.outputs import INVALID, excerpt, format_error, request_ids, sample

__all__ = ["payload_of", "sample_of", "samples_of"]

# Parts of a prompt other than tokens, as `GenerateReqInput` names them.
_MULTIMODAL = ("image_data", "video_data", "audio_data")


def payload_of(requests: Sequence[Request]) -> dict[str, Any]:
    """Return the fields of one `GenerateReqInput` for all requests, with ids for aborts."""
    payload: dict[str, Any] = {
        "rid": request_ids(len(requests)),
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
            # For images, SGLang expects a list per prompt, and detects lists from the first prompt.
            payload[key] = [_as_list(one) for one in values] if key == "image_data" else values
    return payload


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def samples_of(outputs: Any) -> list[Sample]:
    """Return the samples in SGLang's outputs. Raises `EngineError` if an output is invalid."""
    if not isinstance(outputs, list):
        raise EngineError(f"the engine must return a list of samples, not {excerpt(outputs)!r}")
    return [sample_of(output) for output in outputs]


def sample_of(output: Mapping[str, Any]) -> Sample:
    """Return the sample in one of SGLang's outputs. Raises like `samples_of`."""
    try:
        tokens, meta = output["output_ids"], output["meta_info"]
        reason = meta.get("finish_reason") or {}
        finish = reason["type"] if isinstance(reason, Mapping) and reason else reason
        entries = meta.get("output_token_logprobs")
        if entries is None and not tokens:  # a request that was aborted before it began
            entries = []
        logprobs = None if entries is None else [entry[0] for entry in entries]
        return sample(tokens, logprobs, finish, meta.get("weight_version"))
    except INVALID as error:
        raise format_error("SGLang", output, error) from error
