"""What an update of an engine's weights was asked for, and whether that fits the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memsaver.errors import ConfigError
from memsaver.integrations.rollout.weights.disaggregated import WeightGroup
from memsaver.integrations.rollout.weights.sources import Rename
from memsaver.integrations.rollout.weights.verification import check_policy

if TYPE_CHECKING:
    from memsaver.integrations.rollout.backend import PauseMode
    from memsaver.integrations.rollout.engine import RolloutEngine

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """The arguments of `update`, as it says of them."""

    version: str | None
    layout: str
    rename: Rename | None
    bucket_bytes: int
    verify: str
    group: WeightGroup | None
    pause: PauseMode | None
    flush_cache: bool | None
    timeout: float

    def check(self, engine: RolloutEngine) -> None:
        """Raise `ConfigError` or `InvalidStateError` where they do not fit the engine."""
        check_policy(self.verify)
        if self.version is not None and not isinstance(self.version, str):
            raise ConfigError(f"version is text or None, not {self.version!r}")
        if self.layout not in ("whole", "engine"):
            raise ConfigError(f"layout is 'whole' or 'engine', not {self.layout!r}")
        if not isinstance(self.bucket_bytes, int) or self.bucket_bytes <= 0:
            raise ConfigError(
                f"bucket_bytes is a positive number of bytes, not {self.bucket_bytes!r}"
            )
        if self.rename is not None and not callable(self.rename):
            raise ConfigError(f"rename is a function of a name, not {self.rename!r}")
        if self.pause not in (None, "abort", "retract", "in_place"):
            raise ConfigError(
                f"pause is 'abort', 'retract', 'in_place' or None, not {self.pause!r}"
            )
        if self.group is not None and not isinstance(self.group, WeightGroup):
            raise ConfigError(f"group is a WeightGroup or None, not {self.group!r}")
        if self.flush_cache and self.pause == "in_place":
            raise ConfigError(
                "the prefix cache cannot be flushed under requests that are paused in place: they "
                "use it (pause='retract' takes it from them)"
            )
        if self.group is not None:
            self.group.check()
            if self.layout == "engine":
                raise ConfigError(
                    "shards in the engine's layout differ from rank to rank, and a broadcast is "
                    "the same for all: send whole tensors by a group"
                )
        elif engine.tp_size != engine.layout.tp_size:
            raise ConfigError(
                f"the engine has {engine.tp_size} ranks, and its group here "
                f"{engine.layout.tp_size}: on the same GPUs there must be one for each; an engine "
                "elsewhere gets weights by a WeightGroup (`group`)"
            )

    @property
    def flushes(self) -> bool:
        """Whether the prefix cache is given up."""
        return self.pause != "in_place" if self.flush_cache is None else self.flush_cache

    @property
    def load_format(self) -> str:
        """How the engine takes a payload."""
        return "direct" if self.layout == "engine" else "flattened_bucket"
