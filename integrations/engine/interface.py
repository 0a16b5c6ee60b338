"""The calls that an inference engine implements: `Engine` for its sleep, `Backend` for rollouts.

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

    Each call is one request and keeps no state. Every `timeout` is in seconds, for the whole call.

    Errors: `EngineTimeoutError` if there is no answer in time; `EngineError` if the engine died or
    rejects the call; memsaver's own errors if its hooks in the schedulers report one. Without the
    hooks, a `ConfigError` means that the engine did not receive the call.
    """

    def release(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """Release memory. Returns the schedulers' answers; [] if they do not reach the caller.

        Args:
            tags: the tags.
            timeout: see above.
            keep_weights: False if the weights' contents are no longer needed, so that the engine
                need not save them.
        """

    def resume(
        self, tags: Sequence[str], timeout: float, keep_weights: bool = True
    ) -> list[Answer]:
        """Resume memory. Returns answers like `release`.

        Args:
            tags: the tags.
            timeout: see above.
            keep_weights: False if the weights are about to be overwritten, so that the engine need
                not restore them.
        """

    def states(self, timeout: float) -> list[SchedulerState]:
        """Return the state of each data-parallel scheduler; [] if memsaver's hooks are missing."""

    def flush(self, timeout: float) -> bool:
        """Flush the prefix cache; return False, and do nothing, if requests are in flight."""

    def abort(self, timeout: float) -> None:
        """Abort all requests. Some may end shortly after the call returns."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, with the engine's own arguments and results.

        Args:
            args: the engine's arguments.
            kwargs: the engine's arguments, and `timeout`: seconds for the call, by default
                `GENERATION_SECONDS`. For an engine in this process with blocking calls, the timeout
                limits only the wait for other threads' calls.
        """


@dataclass(frozen=True)
class Request:
    """A prompt for which one sample is requested.

    Attributes:
        input_ids: the prompt's tokens; [] if the prompt is a text.
        sampling_params: the engine's sampling parameters, without "n".
        multimodal: the prompt's parts other than tokens, such as "image_data", under the engine's
            names; or None.
        text: the prompt's text, which the engine tokenizes; None if it consists of tokens.
    """

    input_ids: list[int]
    sampling_params: Mapping[str, Any]
    multimodal: Mapping[str, Any] | None = None
    text: str | None = None


@dataclass(frozen=True)
class Sample:
    """The output for one request.

    Attributes:
        token_ids: the generated tokens, without the prompt's.
        logprobs: the log-probability with which each token was sampled; None if the engine reports
            none.
        finish_reason: "stop", "length" or "abort", or the engine's own name for another reason.
        weight_version: the version of the weights at the end of the sample; None if unknown.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str
    weight_version: str | None


@dataclass(frozen=True)
class SharedTensors:
    """Tensors in the sender's memory, which the engine's ranks map into their own processes.

    Attributes:
        payloads: the serialised tensors for each of the engine's ranks, in rank order.
        layout: "whole": tensors as in a checkpoint, for the model's loader. "engine": tensors in
            the layout and under the names of the model's parameters.
        in_bucket: whether whole tensors are in one piece of memory; shards never are.
    """

    payloads: tuple[str, ...]
    layout: Layout = "whole"
    in_bucket: bool = True


@dataclass(frozen=True)
class Broadcast:
    """Whole tensors that rank 0 of a process group broadcasts during the call, in this order.

    Attributes:
        group_name: the group, which the engine's ranks have joined.
        names: the tensors' names.
        dtypes: their types, such as "bfloat16".
        shapes: their shapes.
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
    """A request to join a process group. Rank 0 of the group sends the weights.

    Attributes:
        name: the group's name.
        address: the address of the group's store.
        port: the port of the group's store.
        backend: the torch.distributed backend, "nccl" or "gloo".
        world_size: the number of ranks in the group.
        rank_offset: the rank in the group of the engine's first rank.
    """

    name: str
    address: str
    port: int
    backend: str
    world_size: int
    rank_offset: int = 1


class Backend(Protocol):
    """The calls that `RolloutEngine` makes to an engine, in the leader of a tensor-parallel group.

    Threads: any; calls may wait for each other. Every `timeout` is in seconds, for the whole call.

    Errors: `EngineTimeoutError` if there is no answer in time (the engine may still complete the
    call); `EngineDiedError` if the engine died; `EngineError` if it rejects the call;
    `InvalidStateError` if memory that the call needs is released (the engine did not receive the
    call).
    """

    @property
    def tp_size(self) -> int:
        """The number of the engine's ranks, each with its own payload.

        Ranks are numbered by data-parallel replica, then by pipeline stage, then by rank in the
        tensor-parallel group.
        """

    @property
    def control(self) -> EngineController:
        """The controller of the engine's sleep."""

    def generate(self, requests: Sequence[Request], timeout: float) -> list[Sample]:
        """Return a sample for each request, in order. After `timeout` the requests are aborted."""

    def pause_generation(self, mode: PauseMode, timeout: float) -> None:
        """Stop generating until `continue_generation`; new requests wait.

        Args:
            mode: the treatment of requests in flight. "abort" ends them with the tokens generated
                so far; "retract" drops their KV cache, and computes it again later; "in_place"
                keeps the KV cache, so that they continue with values computed by the old weights;
                "wait" lets them finish first, if the engine can.
            timeout: seconds; after a timeout, generation may or may not be paused.
        """

    def continue_generation(self, timeout: float) -> None:
        """Resume a paused generation. Does nothing if generation is not paused."""

    def maps_regions(self, timeout: float) -> bool:
        """Return whether the engine's ranks can map tensors of this process's shareable regions."""

    def begin_update(self, timeout: float) -> None:
        """Convert the weights to the form for loading, if the engine uses a different one."""

    def load_weights(self, load: WeightLoad) -> list[RankCheck]:
        """Load a bucket of new weights.

        Returns:
            The checks of each of the engine's ranks, even if they found a defect; the engine keeps
            the old version in this case. [] if there was no verification request, or the
            engine cannot verify.
        """

    def end_update(self, timeout: float, complete: bool = True) -> None:
        """Convert the weights to the form for generation, even after a failed load.

        Args:
            timeout: seconds for the call.
            complete: whether all weights were loaded.
        """

    def checksums(self, timeout: float) -> Sequence[str]:
        """Return the checksum of each rank's weights; () if the engine has none.

        The checksums are computed in the engine's own layout, for comparison with other engines.
        """

    def join_group(self, group: JoinRequest, timeout: float) -> None:
        """Make the engine's ranks join a process group.

        Waits for the group's other members, which must join at the same time.
        """

    def leave_group(self, name: str, timeout: float) -> None:
        """Make the engine's ranks leave a process group that they joined."""

    def death(self) -> str:
        """Describe the end of one of the engine's processes; "" if none is known to have ended."""

    def close(self) -> None:
        """Stop the engine if the backend started it; other engines keep running. Idempotent."""
