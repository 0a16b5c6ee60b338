"""Write the model, the tokenizer and the prompts of the measured verl trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_model import SMALL, Shape, save_checkpoint, write_config

SHAPE = Shape(layers=28, hidden=2048, inter=6144, vocab=8192, heads=16)  # Qwen3-1.7B, smaller vocab
PROMPT = 32  # words of each prompt
SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "\n")  # verl requires the last three for Qwen3
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message['content'] }} <|im_end|> \n {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
MODEL, PROMPTS = "model", "prompts.jsonl"


def save(folder: Path, *, small: bool, prompts: int) -> None:
    """Write prompts into a folder, and a checkpoint if the folder contains none.

    Args:
        folder: an existing folder.
        small: whether to write a model of 4 layers.
        prompts: the number of prompts.
    """
    model = folder / MODEL
    if not model.exists():
        model.mkdir()
        shape = SMALL if small else SHAPE
        write_config(shape, model)
        save_checkpoint(shape, model, seed=1)
        tokenizer(shape.vocab).save_pretrained(model)
    lines = (json.dumps(row(number)) for number in range(prompts))
    (folder / PROMPTS).write_text("\n".join(lines) + "\n")


def row(number: int) -> dict[str, Any]:
    """Return a row of verl's data, with a prompt whose beginning is unique."""
    begin = len(SPECIAL) + number * PROMPT
    text = " ".join(f"t{word}" for word in range(begin, begin + PROMPT))
    return {
        "data_source": "even_words",
        "prompt": [{"role": "user", "content": text}],
        "ability": "words",
        "reward_model": {"style": "rule", "ground_truth": "even"},
        "extra_info": {"index": number},
    }


def tokenizer(vocab: int) -> Any:
    """Return a tokenizer with one word for each token id; for example, "t5" is token 5."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"t{number}" for number in range(len(SPECIAL), vocab))]
    vocabulary = {word: number for number, word in enumerate(words)}
    plain = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = Split(" ", "removed")  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        pad_token="<pad>",
        unk_token="<pad>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        padding_side="left",
    )
    made.chat_template = TEMPLATE
    return made
