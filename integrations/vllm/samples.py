"""Convert a rollout's requests to vLLM's format, and vLLM's outputs to samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memsaver.errors import ConfigError

from ..engine.interface import Request, Sample
from ..engine.outputs import INVALID, format_error, sample

__all__ = [
    "completions_of",
    "prompt_of",
    "sample_of",
    "samples_in",
    "sampling_of",
]

_MULTIMODAL = "multi_modal_data"
# Log-probabilities name each token. If the names are token ids, the server needs no tokenizer.
_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def prompt_of(request: Request) -> dict[str, Any]:
    """Return a request's prompt for vLLM."""
    prompt: dict[str, Any] = (
        {"prompt_token_ids": list(request.input_ids)}
        if request.text is None
        else {"prompt": request.text}
    )
    if request.multimodal:
        prompt[_MULTIMODAL] = dict(request.multimodal)
    return prompt


def sampling_of(request: Request) -> Any:
    """Return a request's `SamplingParams`, with log-probabilities of the sampled tokens enabled.

    Raises:
        ConfigError: vLLM rejects the parameters.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = {"logprobs": 0, "detokenize": False, **request.sampling_params}
    try:
        return SamplingParams(**parameters, output_kind=RequestOutputKind.FINAL_ONLY)
    except Exception as error:  # vLLM 0.33's own class is not a ValueError
        raise ConfigError(f"vLLM rejects the sampling_params: {error}") from error


def sample_of(output: Any) -> Sample:
    """Return the sample from an output of vLLM; the output is None for an aborted request.

    Raises:
        EngineError: the output's format is invalid.
    """
    if output is None:
        return Sample([], [], "abort", None)
    try:
        [one] = output.outputs
        tokens = [int(token) for token in one.token_ids]
        entries = one.logprobs
        logprobs = None
        if entries is not None:
            each = zip(entries, tokens, strict=False)
            logprobs = [entry[token].logprob for entry, token in each]
        spans = getattr(one, "weight_versions", None)  # vLLM 0.33
        version = spans[-1].version if spans else None
        return sample(tokens, logprobs, one.finish_reason or "abort", version)
    except INVALID as error:
        raise format_error("vLLM", output, error) from error


# --- a server's completions -----------------------------------------------------------------------


def completions_of(requests: Sequence[Request]) -> list[tuple[list[int], dict[str, Any]]]:
    """Return the bodies of calls to /v1/completions, with the indices of their requests.

    Requests with equal parameters are sent together.

    Raises:
        ConfigError: a prompt contains parts other than tokens or text.
    """
    found: list[tuple[list[int], dict[str, Any]]] = []
    places: dict[tuple[str, bool], int] = {}
    for number, request in enumerate(requests):
        if request.multimodal:
            raise ConfigError(
                "a vLLM server accepts only prompts of tokens or text: for other parts, use an "
                "engine in this process"
            )
        key = repr(sorted(request.sampling_params.items())), request.text is None
        if key not in places:
            places[key] = len(found)
            own = {"logprobs": 0, **request.sampling_params, **_IDS}
            found.append(([], {**own, "prompt": []}))
        numbers, body = found[places[key]]
        numbers.append(number)
        body["prompt"].append(list(request.input_ids) if request.text is None else request.text)
    return found


def samples_in(answer: Any, count: int) -> list[Sample]:
    """Return the samples from a server's response to a request with `count` prompts.

    Raises:
        EngineError: the format of the response is invalid.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        if [choice["index"] for choice in choices] != list(range(count)):
            raise ValueError(f"{len(choices)} choices for {count} prompts")
        return [_choice(choice) for choice in choices]
    except INVALID as error:
        raise format_error("vLLM", answer, error) from error


def _choice(choice: Mapping[str, Any]) -> Sample:
    found = choice.get("logprobs")
    logprobs = None if found is None else found["token_logprobs"]
    spans = choice.get("weight_versions")
    version = spans[-1]["version"] if spans else None
    return sample(choice["token_ids"] or (), logprobs, choice["finish_reason"] or "abort", version)
