"""The ranks of a tensor-parallel group: what one does, all learn of."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memsaver.integrations.sglang.protocol import Failure, RankReport

__all__ = ["Figures", "Group", "first_failure"]


@dataclass(frozen=True)
class Figures:
    """What work on one rank did; fields as of `RankReport`."""

    seconds: float = 0.0
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    copied_bytes: Mapping[str, int] = field(default_factory=dict)


class Group:
    """The ranks of a torch process group that works on the CPU; None is a group of one rank."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def attempt(self, work: Callable[[], Figures | None]) -> list[RankReport]:
        """Do the work on this rank, and learn how it went on every one, in the order of ranks.

        Collective: every rank of the group calls it, also one that could not work. An exception of
        the work becomes its rank's failure.
        """
        mine = RankReport(self.rank, socket.gethostname(), os.getpid())
        try:
            mine = replace(mine, **vars(work() or Figures()))
        except Exception as error:
            mine = replace(mine, failure=Failure.of(error))
        return [RankReport.from_fields(fields) for fields in self.gather(asdict(mine))]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self._size() > 1:
            _distributed().barrier(self._group)

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return int(_distributed().get_rank(self._group)) if self._group is not None else 0

    def _size(self) -> int:
        return int(_distributed().get_world_size(self._group)) if self._group is not None else 1

    def gather(self, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank gives, in the order of ranks: what JSON can say. Collective."""
        # As JSON: what other processes say is parsed, and never executed as a pickle would be.
        size = self._size()
        if size == 1:
            return [dict(fields)]
        text = json.dumps(fields).encode()
        lengths = [int(row[0]) for row in self._all_gather([len(text)], size, "int64")]
        padded = text.ljust(max(lengths), b"\0")
        rows = self._all_gather(list(padded), size, "uint8")
        return [json.loads(bytes(row[:length])) for row, length in zip(rows, lengths, strict=True)]

    def _all_gather(self, numbers: list[int], size: int, dtype: str) -> list[list[int]]:
        """Every rank's numbers, of which each gives as many."""
        import torch

        mine = torch.tensor(numbers, dtype=getattr(torch, dtype))
        rows = [torch.empty_like(mine) for _ in range(size)]
        _distributed().all_gather(rows, mine, group=self._group)
        return [row.tolist() for row in rows]


def first_failure(ranks: list[RankReport]) -> RankReport | None:
    """The report of the first rank that failed."""
    return next((rank for rank in ranks if rank.failure is not None), None)


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed
