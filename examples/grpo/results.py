"""What a run found, as a file of JSON: numbers are written so that they can be compared exactly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memsaver.integrations.rollout import StageReport


@dataclass
class Step:
    """A step of a run.

    Attributes:
        reward: the mean over all answers of all ranks.
        right: the fraction of them that is right.
        loss: of the last pass.
        gradient: its norm.
        gap: as of `Learned`.
        answers: a digest of all tokens of all ranks' answers.
        stages: of each stage that the step had: seconds, and the highest of all ranks' peaks.
    """

    reward: float
    right: float
    loss: float
    gradient: float
    gap: float
    answers: str
    stages: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass
class Results:
    """A run.

    Attributes:
        settings: what it was given.
        device: what it ran on.
        ranks: how many.
        total_bytes: the memory of a device.
        steps: in order.
        weights: a digest of the trainer's weights on all ranks at the end.
    """

    settings: dict[str, Any]
    device: str
    ranks: int
    total_bytes: int = 0
    steps: list[Step] = field(default_factory=list)
    weights: str = ""

    def save(self, path: Path) -> None:
        """Write them."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """What `save` has written.

        Raises:
            OSError: the file cannot be read.
            ValueError: it has no results of this version.
        """
        try:
            fields = json.loads(path.read_text())
            steps = [Step(**step) for step in fields.pop("steps")]
            return cls(steps=steps, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} has no results of a run: {error}") from error

    def stages(self) -> dict[str, list[dict[str, float]]]:
        """What each stage took in each step, in the order in which they come."""
        found: dict[str, list[dict[str, float]]] = {}
        for step in self.steps:
            for name, figures in step.stages.items():
                found.setdefault(name, []).append(figures)
        return found


def figures_of(reports: Iterable[StageReport]) -> dict[str, dict[str, float]]:
    """A step's stages. Those that came twice are taken together."""
    found: dict[str, dict[str, float]] = {}
    for report in reports:
        known = found.get(report.stage.value, {"seconds": 0.0, "peak_bytes": 0})
        found[report.stage.value] = {
            "seconds": known["seconds"] + report.seconds,
            "peak_bytes": max(known["peak_bytes"], report.peak_bytes),
        }
    return found


def digest_of(tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor]) -> str:
    """A digest of the bytes of tensors; of FSDP2's, of this rank's shards."""
    total = hashlib.sha256()
    for tensor in tensors.values() if isinstance(tensors, Mapping) else tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().cpu().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digest_over_ranks(mine: str) -> str:
    """One digest of those of all ranks, the same on each. A collective, over the CPU."""
    if not dist.is_initialized():
        return mine
    all_digests = [""] * dist.get_world_size()
    dist.all_gather_object(all_digests, mine)
    return hashlib.sha256("".join(all_digests).encode()).hexdigest()
