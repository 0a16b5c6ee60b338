"""The arguments of a weight update, and their validation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, get_args

from memsaver._runtime.text import did_you_mean
from memsaver.errors import ConfigError

from ...engine.fields import is_encodable, is_whole
from ...engine.interface import Layout, PauseMode
from .disaggregated import WeightGroup
from .sources import Rename
from .verification import check_policy

if TYPE_CHECKING:
    from ..engine_set import EngineSet
    from ..rollout_engine import RolloutEngine

__all__ = ["Options"]

_LAYOUTS, _PAUSE_MODES = get_args(Layout), get_args(PauseMode)


@dataclass(frozen=True)
class Options:
    """The arguments of `update`.

    Attributes:
        unknown: the names of arguments that `update` does not accept.
    """

    version: str | None
    layout: Layout
    rename: Rename | None
    bucket_bytes: int
    verify: str
    group: WeightGroup | None
    pause: PauseMode | None
    flush_cache: bool | None
    timeout: float
    unknown: tuple[str, ...] = ()

    def check(self, engine: RolloutEngine | EngineSet) -> None:
        """Raise `ConfigError` or `InvalidStateError` if the engine does not support the options."""
        for name in self.unknown:
            known = [one.name for one in fields(self) if one.name != "unknown"]
            raise ConfigError(f"a weight update has no option {name!r}{did_you_mean(name, known)}")
        check_policy(self.verify)
        if self.version is not None and not is_encodable(self.version):
            raise ConfigError(
                f"version must be text or None, and UTF-8 must encode it, not {self.version!r}"
            )
        if self.layout not in _LAYOUTS:
            layouts = " or ".join(map(repr, _LAYOUTS))
            raise ConfigError(f"layout must be {layouts}, not {self.layout!r}")
        if not is_whole(self.bucket_bytes) or self.bucket_bytes <= 0:
            raise ConfigError(
                f"bucket_bytes must be a positive number of bytes, not {self.bucket_bytes!r}"
            )
        if self.rename is not None and not callable(self.rename):
            raise ConfigError(f"rename must be a function of a name, not {self.rename!r}")
        if self.pause not in (None, *_PAUSE_MODES):
            raise ConfigError(
                f"pause must be one of {', '.join(_PAUSE_MODES)} or None, not {self.pause!r}"
            )
        if self.group is not None and not isinstance(self.group, WeightGroup):
            raise ConfigError(f"group must be a WeightGroup or None, not {self.group!r}")
        if not isinstance(self.flush_cache, bool | None):
            raise ConfigError(f"flush_cache must be True, False or None, not {self.flush_cache!r}")
        if self.flush_cache and self.pause == "in_place":
            raise ConfigError(
                "the prefix cache cannot be flushed while requests are paused in place, because "
                "they use it (pause='retract' drops their part of it)"
            )
        if self.group is not None:
            self.group.check(engine)
            if self.layout == "engine":
                raise ConfigError(
                    "shards in the engine's layout differ from rank to rank, and a broadcast sends "
                    "the same tensors to all ranks: with a group, send whole tensors"
                )
        elif hasattr(engine, "engines"):
            raise ConfigError(
                f"an EngineSet receives weights only through a WeightGroup of its {engine.tp_size} "
                "ranks (`group`)"
            )
        elif engine.tp_size > engine.layout.tp_size:
            raise ConfigError(
                f"the engine has {engine.tp_size} ranks, and the trainer's group "
                f"{engine.layout.tp_size}: on the same GPUs the engine cannot have more; an engine "
                "on other GPUs needs a WeightGroup (`group`)"
            )
        elif self.layout == "engine" and engine.tp_size < engine.layout.tp_size:
            raise ConfigError(
                f"the engine has {engine.tp_size} ranks, and the trainer's group "
                f"{engine.layout.tp_size}: shards in the engine's layout need equal numbers"
            )

    def compared(self) -> dict[str, str]:
        """Return the arguments that must be equal on all ranks, formatted for an error message."""
        names = ("version", "layout", "bucket_bytes", "verify", "pause", "flush_cache")
        given = {name: repr(getattr(self, name)) for name in names}
        # Each rank has its own object for the same group.
        return {**given, "group": "None" if self.group is None else "a WeightGroup"}

    @property
    def flushes(self) -> bool:
        """Whether the update flushes the prefix cache."""
        return self.pause != "in_place" if self.flush_cache is None else self.flush_cache
