"""What an inference engine must offer for rollouts, whichever engine it is.

A backend is used in one process of each tensor-parallel group, its leader; `RolloutEngine` brings
the other ranks together with it. `memsaver.integrations.rollout.sglang.backend` is the one that
there is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from memsaver.integrations.sglang.reports import SleepReport
    from memsaver.integrations.sglang.status import Status
    from memsaver.integrations.sglang.weight_checks import Order, RankCheck

__all__ = ["Backend", "Control", "PauseMode", "Request", "Sample"]

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(frozen=True)
class Request:
    """A prompt, of which one sample is wanted.

    Attributes:
        input_ids: the prompt's tokens.
        sampling_params: as the engine names them, but for "n", of which there is none.
        multimodal: what belongs to the prompt beside its tokens, such as "image_data", as the
            engine names it; or None.
    """

    input_ids: list[int]
    sampling_params: Mapping[str, Any]
    multimodal: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Sample:
    """What was generated for a request.

    Attributes:
        token_ids: the generated tokens, without the prompt's.
        logprobs: the log-probability that each of them was sampled with; None where the engine
            does not say.
        finish_reason: "stop", "length" or "abort", or what else the engine calls it.
        weight_version: the version of the weights when it was finished; None where unknown.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str
    weight_version: str | None


class Control(Protocol):
    """The engine's sleep: what `memsaver.integrations.sglang.SleepController` says of each."""

    @property
    def status(self) -> Status:
        """What of the engine's memory is there, as far as is known."""

    @property
    def released(self) -> frozenset[str]:
        """The tags that are released."""

    def refresh(self) -> Status:
        """Ask the engine for its state."""

    def check(self, operation: str) -> None:
        """Raise `InvalidStateError` where the engine would not survive it."""

    def request(self, operation: str = "generate") -> contextlib.AbstractContextManager[None]:
        """For the block, that operation is under way, and the engine does not sleep."""

    def sleep(
        self,
        tags: str | Sequence[str] | None = None,
        *,
        wait_idle: bool = False,
        abort: bool = False,
        flush: bool = False,
        timeout: float = 60.0,
    ) -> SleepReport:
        """Give the memory of `tags` back; all of them when none is named."""

    def wake_up(
        self, tags: str | Sequence[str] | None = None, *, timeout: float = 60.0
    ) -> SleepReport:
        """Take memory for `tags` again; for all that are released when none is named."""


class Backend(Protocol):
    """An engine, as its leader sees it.

    Threads: any; calls may wait for each other. Every `timeout` is in seconds, for all of the call.

    Errors: `EngineTimeoutError` where there is no answer in time, and the engine may still do what
    it was asked to; `EngineError` where the engine is gone or refuses; `InvalidStateError` where
    the memory that is needed is released, and the engine was not asked.
    """

    @property
    def tp_size(self) -> int:
        """The ranks of the engine's tensor-parallel group: how many payloads it loads."""

    @property
    def control(self) -> Control:
        """Its sleep."""

    def generate(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """A sample of each request, in their order. At the end of `timeout` they are aborted."""

    def pause_generation(self, mode: PauseMode, timeout: float) -> None:
        """Stop generating until `continue_generation`; requests that come meanwhile wait.

        Args:
            mode: what becomes of those in flight. "abort" ends them with what they have,
                "retract" takes their KV cache away and computes it again afterwards, "in_place"
                keeps it: they go on with what old weights computed.
            timeout: seconds; where it is over, generation is paused or not.
        """

    def continue_generation(self, timeout: float) -> None:
        """End a pause. Nothing happens where there is none."""

    def load_tensors(
        self,
        payloads: Sequence[str],
        *,
        load_format: str | None,
        flush_cache: bool,
        weight_version: str | None,
        order: Order | None = None,
        timeout: float,
    ) -> list[RankCheck]:
        """Load tensors that the engine's ranks can open.

        Args:
            payloads: one for each rank of the engine, in their order: named tensors, serialised.
            load_format: how the engine is to take them; None is the model's own loader.
            flush_cache: whether the prefix cache is given up: with the last payload, at least.
            weight_version: what the weights are called from now on; None leaves the name.
            order: what the engine's ranks are to check; None is nothing.
            timeout: seconds.

        Returns:
            What each rank of the engine found, also where that is not what was sent: the version
            is not taken over then. [] without an order, and from an engine that cannot check.
        """

    def begin_update(self, timeout: float) -> None:
        """Bring the weights into the form in which they are loaded, if the engine has another."""

    def end_update(self, timeout: float) -> None:
        """Bring them back into the form in which they are used. Also after a load that failed."""

    def checksums(self, timeout: float) -> Sequence[str]:
        """What each of the engine's ranks has for a checksum of its weights; () where it has none.

        Of weights in the engine's own layout: to be compared with those of another engine.
        """

    def join_group(
        self,
        address: str,
        port: int,
        *,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout: float,
    ) -> None:
        """Let the engine's ranks join a process group, as ranks from `rank_offset` on.

        Waits for the group's other members, which have to come meanwhile.
        """

    def load_broadcast(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        load_format: str | None,
        flush_cache: bool,
        weight_version: str | None,
        order: Order | None = None,
        timeout: float,
    ) -> list[RankCheck]:
        """Load tensors that rank 0 of a group that was joined broadcasts meanwhile, in order.

        Args:
            names: the tensors' names.
            dtypes: theirs, as "bfloat16".
            shapes: theirs.
            group_name: the group's name.
            load_format: as of `load_tensors`, likewise the rest.
            flush_cache: see there.
            weight_version: see there.
            order: see there; likewise what is returned.
            timeout: seconds.
        """

    def leave_group(self, group_name: str, timeout: float) -> None:
        """Let the engine's ranks leave a group that they joined."""

    def close(self) -> None:
        """End the engine, if the backend started it. Idempotent; others' engines live on."""
