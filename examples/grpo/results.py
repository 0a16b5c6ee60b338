"""Save a run's results as a JSON file, with exact numbers for comparisons."""

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
        reward: the mean reward of all answers on all ranks.
        right: the fraction of right answers.
        loss: the loss of the last pass.
        gradient: the norm of its gradient.
        gap: see `Learned.gap`.
        answers: a digest of all tokens of all ranks' answers.
        stages: for each stage of the step, the duration in seconds and the highest memory peak of
            all ranks.
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
    """The results of a run.

    Attributes:
        settings: the run's settings.
        device: the name of the run's devices.
        ranks: the number of ranks.
        total_bytes: the memory of a device.
        steps: the steps, in order.
        weights: a digest of the trainer's weights on all ranks at the end.
    """

    settings: dict[str, Any]
    device: str
    ranks: int
    total_bytes: int = 0
    steps: list[Step] = field(default_factory=list)
    weights: str = ""

    def save(self, path: Path) -> None:
        """Write the results to a file."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file does not contain results in this version's format.
        """
        try:
            fields = json.loads(path.read_text())
            steps = [Step(**step) for step in fields.pop("steps")]
            return cls(steps=steps, **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} has no results of a run: {error}") from error

    def stages(self) -> dict[str, list[dict[str, float]]]:
        """Return each stage's durations and memory peaks, in the order of first occurrence."""
        found: dict[str, list[dict[str, float]]] = {}
        for step in self.steps:
            for name, figures in step.stages.items():
                found.setdefault(name, []).append(figures)
        return found


def figures_of(reports: Iterable[StageReport]) -> dict[str, dict[str, float]]:
    """Return the duration and memory peak of each stage; repeated runs of a stage are combined."""
    found: dict[str, dict[str, float]] = {}
    for report in reports:
        known = found.get(report.stage.value, {"seconds": 0.0, "peak_bytes": 0})
        found[report.stage.value] = {
            "seconds": known["seconds"] + report.seconds,
            "peak_bytes": max(known["peak_bytes"], report.peak_bytes),
        }
    return found


def digest_of(tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor]) -> str:
    """Return a digest of the bytes of tensors; for FSDP2's tensors, only of this rank's shards."""
    total = hashlib.sha256()
    for tensor in tensors.values() if isinstance(tensors, Mapping) else tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().cpu().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def digest_over_ranks(mine: str) -> str:
    """Combine the digests of all ranks into one digest, which is the same on all ranks.

    This is a collective operation on the CPU.
    """
    if not dist.is_initialized():
        return mine
    all_digests = [""] * dist.get_world_size()
    dist.all_gather_object(all_digests, mine)
    return hashlib.sha256("".join(all_digests).encode()).hexdigest()
