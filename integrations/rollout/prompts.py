"""Converts the arguments of `RolloutEngine.generate` to requests, one for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memsaver.errors import ConfigError

from ..engine.fields import is_encodable, is_whole
from ..engine.interface import Request

__all__ = ["Prompts", "prompts_of"]

_SEEDS = ("sampling_seed", "seed")  # the seed's names in SGLang and in vLLM


@dataclass(frozen=True)
class Prompts:
    """A rank's prompts.

    Attributes:
        requests: one request for each sample; the requests for a prompt are adjacent, in the order
            of the prompts.
        index: for each request, the index of its prompt.
    """

    requests: list[Request]
    index: list[int]


def prompts_of(
    input_ids: Any,
    sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    attention_mask: Any = None,
    multimodal: Sequence[Mapping[str, Any] | None] | None = None,
) -> Prompts:
    """Return the requests for prompts.

    Args:
        input_ids: a list of lists of tokens, a list of 1-D tensors, a 2-D tensor, or a list of
            texts.
        sampling_params: one mapping for all prompts, or one mapping for each prompt. "n" is the
            number of samples per prompt (default 1). If the parameters contain a "sampling_seed" or
            a "seed", sample k uses that seed plus k, because samples with the same seed would be
            identical.
        attention_mask: for a padded tensor, 1 for tokens and 0 for padding; the padding can be on
            either side.
        multimodal: for each prompt, its images and other parts that are not tokens, or None.

    Raises:
        ConfigError: a prompt is empty or contains something other than non-negative integers, only
            some prompts are texts, a list has the wrong length, or another argument is invalid.
    """
    prompts = _prompts(input_ids, attention_mask)
    each_params = _for_each({} if sampling_params is None else sampling_params, len(prompts))
    extras = _extras(multimodal, len(prompts))
    requests: list[Request] = []
    index: list[int] = []
    for number, (tokens, params, extra) in enumerate(
        zip(prompts, each_params, extras, strict=True)
    ):
        named = dict(params)
        count = named.pop("n", 1)
        if not is_whole(count) or count < 1:
            raise ConfigError(f"sampling_params: n must be a positive integer, not {count!r}")
        key = next((name for name in _SEEDS if named.get(name) is not None), "")
        seed = named.get(key)
        if seed is not None and not is_whole(seed):
            raise ConfigError(f"sampling_params: {key} must be an integer, not {seed!r}")
        for sample in range(count):
            own = named if seed is None or not sample else {**named, key: seed + sample}
            text = tokens if isinstance(tokens, str) else None
            requests.append(Request([] if isinstance(tokens, str) else tokens, own, extra, text))
            index.append(number)
    return Prompts(requests, index)


def _for_each(params: Any, count: int) -> list[Mapping[str, Any]]:
    if isinstance(params, Mapping):
        return [params] * count
    several = list(params) if isinstance(params, Iterable) else None
    if several is None or not _are_for(several, count, Mapping):
        raise ConfigError(
            f"sampling_params must be a mapping, or a list with one for each of {count} prompts"
        )
    return several


def _extras(multimodal: Any, count: int) -> list[Mapping[str, Any] | None]:
    if multimodal is None:
        return [None] * count
    several = list(multimodal) if isinstance(multimodal, Iterable) else None
    if several is None or not _are_for(several, count, (Mapping, type(None))):
        raise ConfigError(
            f"multimodal must be a list with a mapping or None for each of {count} prompts"
        )
    return several


def _are_for(several: list[Any], count: int, kinds: Any) -> bool:
    return len(several) == count and all(isinstance(one, kinds) for one in several)


def _prompts(input_ids: Any, attention_mask: Any) -> Sequence[list[int] | str]:
    if isinstance(input_ids, str):
        raise ConfigError("input_ids must be a list of prompts: put a single text into a list")
    texts = isinstance(input_ids, list | tuple) and [one for one in input_ids if type(one) is str]
    if not texts:
        return _token_lists(input_ids, attention_mask)
    if len(texts) < len(input_ids):
        raise ConfigError("either all prompts of a call must be texts, or none")
    if attention_mask is not None:
        raise ConfigError("an attention_mask needs input_ids that are a padded tensor, not texts")
    for number, text in enumerate(texts):
        if not text or not is_encodable(text):
            raise ConfigError(
                f"prompt {number} must be a text that UTF-8 can encode, and not empty"
            )
    return texts


def _token_lists(input_ids: Any, attention_mask: Any) -> list[list[int]]:
    if hasattr(input_ids, "dim"):
        rows = _rows_of(input_ids, attention_mask)
    elif attention_mask is not None:
        raise ConfigError("an attention_mask needs input_ids that are a padded tensor")
    else:
        try:
            rows = [_list_of(row) for row in input_ids]
        except TypeError:
            raise ConfigError(
                "input_ids must be a list of prompts, each a list of tokens, or a tensor with a "
                "row for each prompt"
            ) from None
    for number, row in enumerate(rows):
        if not row:
            raise ConfigError(f"prompt {number} has no tokens")
        wrong = next((t for t in row if not is_whole(t) or t < 0), None)
        if wrong is not None:
            raise ConfigError(
                f"prompt {number}: a token must be a non-negative integer, not {wrong!r}"
            )
    return rows


def _rows_of(input_ids: Any, attention_mask: Any) -> list[list[int]]:
    if input_ids.dim() != 2:
        raise ConfigError(f"a tensor of input_ids must have 2 dimensions, not {input_ids.dim()}")
    if attention_mask is None:
        return [row.tolist() for row in input_ids]
    if not hasattr(attention_mask, "dim"):
        raise ConfigError(
            f"the attention_mask of a tensor must be a tensor, not {type(attention_mask).__name__}"
        )
    if attention_mask.shape != input_ids.shape:
        raise ConfigError(
            f"the attention_mask's shape {tuple(attention_mask.shape)} differs from that of "
            f"input_ids, {tuple(input_ids.shape)}"
        )
    tokens, masks = input_ids.tolist(), attention_mask.tolist()
    for number, mask in enumerate(masks):
        digits = "".join("1" if one == 1 else "0" if one == 0 else "?" for one in mask)
        if "?" in digits or "0" in digits.strip("0"):
            raise ConfigError(
                f"prompt {number}: an attention_mask must be 1 for a contiguous run of tokens and "
                "0 for the padding"
            )
    return [
        [token for token, mask in zip(row, kept, strict=True) if mask]
        for row, kept in zip(tokens, masks, strict=True)
    ]


def _list_of(row: Any) -> list[Any]:
    listed: list[Any] = row.tolist() if hasattr(row, "tolist") else list(row)
    if not isinstance(listed, list):  # the result for a tensor without dimensions
        raise TypeError
    return listed
