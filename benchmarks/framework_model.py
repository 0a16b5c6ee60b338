"""Write a small Qwen3 checkpoint with a tokenizer that frameworks can load without a network."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from engine_model import SMALL, save_checkpoint

NUMBERS = 256  # smaller token ids are special or unused; the others are the words "t256" ...
PROMPT = 16  # words of each prompt
SEED = 1


def save(options: argparse.Namespace) -> None:
    """Write the weights and the tokenizer next to the model's config.json if they are missing."""
    folder: Path = options.model
    if not (folder / "model.safetensors").exists():
        save_checkpoint(SMALL, folder, SEED)
        tokenizer().save_pretrained(folder)


def tokenizer() -> Any:
    """Return a tokenizer with one word for each token id; for example, "t5" is token 5."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<bos>", "<eos>", "<unk>")
    words = [*special, *(f"t{number}" for number in range(len(special), SMALL.vocab))]
    vocabulary = {word: number for number, word in enumerate(words)}
    plain = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def prompts(count: int) -> list[str]:
    """Return prompts of PROMPT words; the words repeat once all of them have been used."""
    words = [f"t{number}" for number in range(NUMBERS, SMALL.vocab)]
    starts = (number * PROMPT % len(words) for number in range(count))
    return [" ".join(words[at : at + PROMPT]) for at in starts]


def reward(tokens: list[int]) -> float:
    """Return the fraction of even tokens, which a trainer can increase and a test can verify."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)
