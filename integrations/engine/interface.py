"""The calls that an engine implements: `Engine` for sleep, and `Backend` for rollouts.

`memsaver.integrations.sglang` and `memsaver.integrations.vllm` implement both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from .messages import Answer, SchedulerState

if TYPE_CHECKING:
    from .sleep import EngineController
    from .weights.checks import RankCheck, VerificationRequest

__all__ = [
    "GENERATION_SECONDS",
    "Backend",
    "Broadcast",
    "Engine",
    "JoinRequest",
    "Layout",
    "PauseMode",
    "Request",
    "Sample",
    "SharedTensors",
    "WeightLoad",
]

GENERATION_SECONDS = 3600.0  # the default of `Engine.generate`

Layout = Literal["whole", "engine"]
PauseMode = Literal["abort", "retract", "in_place", "wait"]


class Engine(Protocol):
    """The calls that `EngineController` makes to an engine.

    Each call is one request and stores no state. Every `timeout` is in seconds and limits the whole
    call.

    Errors: a call raises `EngineTimeoutError` if no answer arrives in time, and `EngineError` if
    the engine died or rejects the call. A call also raises the errors that memsaver's hooks in the
    schedulers report. Without the hooks, a `ConfigError` means that the engine did not receive the
    call.
    """

    def release(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """Release memory. Returns the schedulers' answers; [] if none reach the caller.

        Args:
            tags: the engine's tags to change.
            timeout: the limit for the call, in seconds.
            keep_weights: whether the weights' contents are still needed; if False, the engine need
                not save them.
        """

    def resume(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """Resume memory. Returns answers like `release`.

        Args:
            tags: the engine's tags to change.
            timeout: the limit for the call, in seconds.
            keep_weights: whether the weights' contents are still needed; if False, the contents are
                about to be overwritten, and the engine need not restore them.
        """

    def states(self, timeout: float) -> list[SchedulerState]:
        """Return the state of each data-parallel scheduler; [] if memsaver's hooks are missing."""

    def flush(self, timeout: float) -> bool:
        """Flush the prefix cache; if requests are in flight, do nothing and return False."""

    def abort(self, timeout: float) -> None:
        """Abort all requests. Some requests may end shortly after the call returns."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run a generation with the engine's own arguments and results.

        Args:
            args: the engine's positional arguments.
            kwargs: the engine's keyword arguments, and `timeout`, the seconds for the call (by
                default `GENERATION_SECONDS`). For an engine in this process with blocking calls,
                the timeout limits only the wait for other threads' calls.
        """


@dataclass(frozen=True)
class Request:
    """A prompt for which the engine generates one sample.

    Attributes:
        input_ids: the prompt's tokens; [] if the prompt is text.
        sampling_params: the engine's sampling parameters, without "n".
        multimodal: the parts of the prompt that are not tokens, keyed by the engine's names for
            them, such as "image_data"; None if there are none.
        text: the prompt's text, which the engine tokenizes; None if the prompt consists of tokens.
    """

    input_ids: list[int]
    sampling_params: Mapping[str, Any]
    multimodal: Mapping[str, Any] | None = None
    text: str | None = None


@dataclass(frozen=True)
class Sample:
    """The output for one request.

    Attributes:
        token_ids: the generated tokens, without the prompt's tokens.
        logprobs: the log-probability of each sampled token; None if the engine does not report it.
        finish_reason: either "stop", "length" or "abort", or the engine's own name for any other
            reason.
        weight_version: the version of the weights when the sample ended; None if unknown.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str
    weight_version: str | None


@dataclass(frozen=True)
class SharedTensors:
    """Tensors in the sender's memory that the engine's ranks map into their own processes.

    Attributes:
        payloads: the serialized tensors for each of the engine's ranks, in rank order.
        layout: either "whole", for tensors as in a checkpoint, which the model's loader reads, or
            "engine", for tensors with the layout and the names of the model's parameters.
        in_bucket: for the layout "whole", whether the tensors are in one contiguous block of
            memory; otherwise ignored.
    """

    payloads: tuple[str, ...]
    layout: Layout = "whole"
    in_bucket: bool = True


@dataclass(frozen=True)
class Broadcast:
    """Whole tensors that rank 0 of a process group broadcasts in this order during the call.

    Attributes:
        group_name: the name of the group, which the engine's ranks have joined.
        names: the tensors' names.
        dtypes: the tensors' types, such as "bfloat16".
        shapes: the tensors' shapes.
    """

    group_name: str
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class WeightLoad:
    """A request to load one bucket of new weights.

    Attributes:
        tensors: the source of the tensors.
        timeout: seconds for the whole load.
        flush_cache: whether to flush the prefix cache after the load.
        weight_version: the new version of the weights; None keeps the current one.
        verification: the checks that the engine's ranks run; None for no checks.
    """

    tensors: SharedTensors | Broadcast
    timeout: float
    flush_cache: bool = False
    weight_version: str | None = None
    verification: VerificationRequest | None = None


@dataclass(frozen=True)
class JoinRequest:
    """A request to join a process group whose rank 0 sends the weights.

    Attributes:
        name: the group's name.
        address: the address of the group's store.
        port: the port of the group's store.
        backend: the torch.distributed backend, "nccl" or "gloo".
        world_size: the number of ranks in the group.
        rank_offset: the group rank of the engine's first rank.
    """

    name: str
    address: str
    port: int
    backend: str
    world_size: int
    rank_offset: int = 1


class Backend(Protocol):
    """The calls that `RolloutEngine` makes to an engine, on the leader of a tensor-parallel group.

    Any thread may make calls; calls may wait for each other. Every `timeout` is in seconds and
    limits the whole call.

    Errors: `EngineTimeoutError` if no answer arrives in time (the engine may still complete the
    call); `EngineDiedError` if the engine died; `EngineError` if it rejects the call; and
    `InvalidStateError` if memory that the call needs is released (the engine did not receive the
    call).
    """

    @property
    def tp_size(self) -> int:
        """The number of ranks in the engine, each of which has its own payload.

        Ranks are numbered by data-parallel replica, then by pipeline stage, then by rank in the
        tensor-parallel group.
        """

    @property
    def control(self) -> EngineController:
        """The controller that puts the engine to sleep and wakes it."""

    def generate(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """Return a sample for each request, in order. The requests are aborted after `timeout`."""

    def pause_generation(self, mode: PauseMode, timeout: float) -> None:
        """Stop generation until `continue_generation` is called; new requests wait.

        Args:
            mode: the treatment of requests in flight. "abort" ends the requests with the tokens
                generated so far. "retract" drops the requests' KV cache and recomputes the cache
                later. "in_place" keeps the KV cache, so the requests continue with values computed
                by the old weights. "wait" waits until the requests finish, if the engine supports
                this mode.
            timeout: the limit in seconds; after a timeout, it is unknown whether generation is
                paused.
        """

    def continue_generation(self, timeout: float) -> None:
        """Resume a paused generation. Does nothing if generation is not paused."""

    def maps_regions(self, timeout: float) -> bool:
        """Return whether the engine's ranks can map tensors in this process's shareable regions."""

    def begin_update(self, timeout: float) -> None:
        """Convert the weights to the format for loading, if the engine has a separate one."""

    def load_weights(self, load: WeightLoad) -> list[RankCheck]:
        """Load a bucket of new weights.

        Returns:
            The results of each rank's checks, even if a check found a defect, in which case the
            engine keeps the old version. The list is empty if there was no verification request, or
            if the engine cannot verify weights.
        """

    def end_update(self, timeout: float, complete: bool = True) -> None:
        """Convert the weights back to the format for generation, even after a failed load.

        Args:
            timeout: the maximum duration of the call, in seconds.
            complete: whether all weights were loaded.
        """

    def checksums(self, timeout: float) -> Sequence[str]:
        """Return the checksum of each rank's weights; () if the engine computes none.

        Each engine computes the checksums of its own layout, for comparison with other engines.
        """

    def join_group(self, group: JoinRequest, timeout: float) -> None:
        """Make the engine's ranks join a process group.

        Waits for the group's other members, which must join at the same time.
        """

    def leave_group(self, name: str, timeout: float) -> None:
        """Make the engine's ranks leave a process group that they joined."""

    def death(self) -> str:
        """Describe how one of the engine's processes ended; "" if none is known to have ended."""

    def close(self) -> None:
        """Stop the engine if the backend started it; other engines keep running. Idempotent."""
