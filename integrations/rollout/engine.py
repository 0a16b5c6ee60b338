"""`RolloutEngine`: one interface over an inference engine, called alike on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memsaver.integrations.rollout.backend import Backend, PauseMode
from memsaver.integrations.rollout.output import RolloutOutput
from memsaver.integrations.rollout.ranks import Layout
from memsaver.integrations.rollout.together import Together

if TYPE_CHECKING:
    from memsaver.integrations.sglang.reports import SleepReport
    from memsaver.integrations.sglang.status import Status

__all__ = ["RolloutEngine"]


class RolloutEngine:
    """INTERFACE ONLY SO FAR; bodies follow.

    Attributes (read by `weights` and `session`):
        layout: `ranks.Layout` (rank, tp_group, tp_ranks, tp_rank, tp_size, leader, is_leader, ...).
        backend: the `Backend` on the leader, None on every other rank.
        together: `together.Together` over the tp group: `on_leader(what, action, timeout)` runs
            `action()` on the leader and gives its result to every rank, or raises on all.
        tp_size: ranks of the engine (a server's may differ from the layout's), known on all ranks.
        timeout: seconds that a call may take unless it says otherwise.
    """

    layout: Layout
    backend: Backend | None
    together: Together
    tp_size: int
    timeout: float

    @classmethod
    def launch(
        cls,
        mesh: Any = None,
        *,
        tp: str = "tp",
        dp: str | Sequence[str] = "dp",
        timeout: float = 600.0,
        pad_token_id: int = 0,
        **server_args: Any,
    ) -> RolloutEngine: ...

    @classmethod
    def connect(
        cls,
        engine: Any,
        mesh: Any = None,
        *,
        tp: str = "tp",
        dp: str | Sequence[str] = "dp",
        timeout: float = 600.0,
        pad_token_id: int = 0,
        api_key: str | None = None,
    ) -> RolloutEngine: ...

    def generate(
        self,
        input_ids: Any,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        attention_mask: Any = None,
        multimodal: Sequence[Mapping[str, Any] | None] | None = None,
        timeout: float | None = None,
    ) -> RolloutOutput: ...

    @property
    def status(self) -> Status: ...
    @property
    def released(self) -> frozenset[str]: ...
    def refresh(self) -> Status: ...
    def check(self, operation: str) -> None: ...
    def sleep(
        self,
        tags: str | Sequence[str] | None = None,
        *,
        wait_idle: bool = False,
        abort: bool = False,
        flush: bool = False,
        fence: bool = False,
        timeout: float | None = None,
    ) -> SleepReport: ...
    def wake_up(
        self,
        tags: str | Sequence[str] | None = None,
        *,
        fence: bool = False,
        timeout: float | None = None,
    ) -> SleepReport: ...
    @contextlib.contextmanager
    def asleep(
        self, tags: str | Sequence[str] | None = None, **options: Any
    ) -> Iterator[SleepReport]: ...
    @contextlib.contextmanager
    def staged_wake(
        self, *, fence: bool = False, timeout: float | None = None
    ) -> Iterator[list[SleepReport]]: ...
    def pause_generation(self, mode: PauseMode = "abort", timeout: float | None = None) -> None: ...
    def continue_generation(self, timeout: float | None = None) -> None: ...
    def update_weights(self, state: Any, **options: Any) -> Any: ...
    def close(self) -> None: ...
    def __enter__(self) -> RolloutEngine: ...
    def __exit__(self, *_: object) -> None: ...
