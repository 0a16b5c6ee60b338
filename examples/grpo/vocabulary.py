"""Define the tokens for arithmetic: a small vocabulary or a part of a model's vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from settings import SettingsError

SYMBOLS = tuple("0123456789+-*=")


@dataclass(frozen=True)
class Vocabulary:
    """The token ids, and the size of the model's vocabulary.

    Attributes:
        ids: the token id of each symbol.
        pad: the token for padding.
        start: the token before a problem.
        end: the token after an answer.
        size: the size of the model's vocabulary.
    """

    ids: Mapping[str, int]
    pad: int
    start: int
    end: int
    size: int

    @classmethod
    def own(cls) -> Vocabulary:
        """Return a vocabulary for a model with random weights.

        The vocabulary has 32 tokens so that it divides evenly among the ranks.
        """
        return cls({symbol: 3 + i for i, symbol in enumerate(SYMBOLS)}, 0, 1, 2, 32)

    @classmethod
    def of_model(cls, folder: Path) -> Vocabulary:
        """Return the vocabulary of a checkpoint whose tokenizer encodes each symbol as one token.

        Raises:
            SettingsError: the tokenizer lacks a symbol, or there is no checkpoint.
        """
        try:
            config = json.loads((folder / "config.json").read_text())
            known = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        except (OSError, ValueError, LookupError) as error:
            raise SettingsError(f"{folder} has no checkpoint with a tokenizer: {error}") from error
        missing = [symbol for symbol in SYMBOLS if symbol not in known]
        if missing:
            raise SettingsError(f"{folder}: its tokenizer has no tokens for {' '.join(missing)}")
        end = config["eos_token_id"]
        end = end[0] if isinstance(end, list) else end
        pad, start = config.get("pad_token_id"), config.get("bos_token_id")
        return cls(
            {symbol: known[symbol] for symbol in SYMBOLS},
            end if pad is None else pad,
            end if start is None else start,
            end,
            config["vocab_size"],
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a problem, after the start token."""
        return [self.start, *(self.ids[symbol] for symbol in text)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens: "." for the end token, "?" for tokens without a symbol."""
        symbols = {number: symbol for symbol, number in self.ids.items()} | {self.end: "."}
        return "".join(symbols.get(int(token), "?") for token in tokens)
