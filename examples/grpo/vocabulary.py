"""The few tokens that arithmetic needs: an own vocabulary, or those tokens of a model's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from settings import SettingsError

SYMBOLS = tuple("0123456789+-*=")


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by their numbers.

    Attributes:
        ids: the number of each symbol.
        pad: what fills the ends of rows.
        start: in front of a problem.
        end: after an answer.
        size: how many tokens the model knows.
    """

    ids: Mapping[str, int]
    pad: int
    start: int
    end: int
    size: int

    @classmethod
    def own(cls) -> Vocabulary:
        """One for a model with random weights; 32 tokens, so that ranks can share it out."""
        return cls({symbol: 3 + i for i, symbol in enumerate(SYMBOLS)}, 0, 1, 2, 32)

    @classmethod
    def of_model(cls, folder: Path) -> Vocabulary:
        """That of a checkpoint, whose tokenizer has the symbols as tokens of their own.

        Raises:
            SettingsError: it has not, or there is none.
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
        """The tokens of a problem, with the start in front."""
        return [self.start, *(self.ids[symbol] for symbol in text)]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; "." is the end, "?" what is no symbol."""
        symbols = {number: symbol for symbol, number in self.ids.items()} | {self.end: "."}
        return "".join(symbols.get(int(token), "?") for token in tokens)
