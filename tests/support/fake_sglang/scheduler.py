"""The scheduler process with its weight updater and its memory saver.

The first exception terminates the process.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import ClassVar

import torch

from fake_sglang import messages
from fake_sglang.messages import (
    FlushCacheReqOutput,
    GetInternalStateReqOutput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqOutput,
)

TAGS = ("kv_cache", "weights", "cuda_graph")


class Saver:
    """A memory saver other than memsaver's.

    A resume fails if memory is exhausted or the tag is not paused.
    """

    def __init__(self) -> None:
        self.paused: set[str] = set()
        self.full = False

    enabled = True

    def pause(self, tag: str) -> None:
        if tag in self.paused:
            raise RuntimeError(f"{tag} is paused already")
        self.paused.add(tag)

    def resume(self, tag: str) -> None:
        if self.full:
            raise MemoryError(tag)
        self.paused.remove(tag)


class Handlers:
    """SGLang's release and resume handlers, with only the checks that SGLang performs.

    Attributes:
        owner: the scheduler.
    """

    def begin_awake(self, saver, group) -> None:
        self.memory_saver_adapter, self.tp_cpu_group = saver, group
        self.offload_tags: set[str] = set()
        self.prepare_error: Exception | None = None  # raised by a release before its barrier
        self.resume_errors: dict[str, Exception] = {}  # raised by a resume, by place
        self.queue_open = True  # the KV cache's queue

    def release_memory_occupation(self, recv_req):
        assert self.is_fully_idle(), "only when the server is idle"
        tags = recv_req.tags or TAGS
        self.offload_tags.update(tags)
        if "kv_cache" in tags:
            self.queue_open = False
            self.memory_saver_adapter.pause("kv_cache")
            self.owner.flush_cache()
        if "weights" in tags:
            if self.prepare_error is not None:
                raise self.prepare_error
            self.stashed_model_static_state = self.owner.buffers()
            self._barrier()
            self.memory_saver_adapter.pause("weights")
        if "cuda_graph" in tags:
            self.memory_saver_adapter.pause("cuda_graph")
        return ReleaseMemoryOccupationReqOutput()

    def resume_memory_occupation(self, recv_req):
        tags = recv_req.tags or TAGS
        for tag in tags:
            self.offload_tags.remove(tag)
        if "cuda_graph" in tags:
            self.memory_saver_adapter.resume("cuda_graph")
        if "weights" in tags:
            self._raise("before weights")
            self.memory_saver_adapter.resume("weights")
            self._barrier()
            self._raise("after weights")
            self.owner.restore_buffers(self.stashed_model_static_state)
            del self.stashed_model_static_state
        if "kv_cache" in tags:
            self.memory_saver_adapter.resume("kv_cache")
            self.queue_open = True
            self._raise("after kv_cache")
        return ResumeMemoryOccupationReqOutput()

    def _raise(self, where: str) -> None:
        if where in self.resume_errors:
            raise self.resume_errors[where]

    def _barrier(self) -> None:
        if self.tp_cpu_group is not None:
            import torch.distributed

            torch.distributed.barrier(self.tp_cpu_group)


class UnownedUpdater(Handlers):
    """The updater of SGLang 0.5.13, which has the scheduler's methods but no reference to the
    scheduler.
    """

    def __init__(self, scheduler, saver, group=None) -> None:
        self.owner, self.is_fully_idle = scheduler, scheduler.is_fully_idle
        self.begin_awake(saver, group)


class Updater(UnownedUpdater):
    """The updater of SGLang 0.5.16 and 0.5.23."""

    def __init__(self, scheduler, saver, group=None) -> None:
        super().__init__(scheduler, saver, group)
        self.scheduler = scheduler


class UpdateWeightsMixin(Handlers):
    """SGLang 0.5.12's handlers, which are methods of the scheduler."""

    @property
    def owner(self):
        return self


@dataclass
class Tensor:
    """Bytes in device or host memory.

    Attributes:
        can_pin: whether the driver can pin host memory.
    """

    can_pin: ClassVar[bool] = True

    data: bytes
    is_cuda: bool = True
    is_pinned: bool = False

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None) -> Tensor:
        assert function is torch.empty_like and kwargs["device"] == "cpu"
        is_pinned = kwargs.get("pin_memory", False)
        if is_pinned and not cls.can_pin:
            raise RuntimeError("CUDA error: out of memory")
        return cls(bytes(len(args[0].data)), is_cuda=False, is_pinned=is_pinned)

    def copy_(self, source: Tensor) -> Tensor:
        assert len(source.data) == len(self.data)
        self.data = source.data
        return self


class Sent:
    """A socket to the tokenizer manager."""

    def __init__(self) -> None:
        self.messages: list = []

    def send_output(self, output, request=None) -> None:
        self.messages.append(output)


class Scheduler:
    """A scheduler process, which handles one message at a time. The first exception terminates the
    process.
    """

    def __init__(self, make_updater=Updater, saver=None, group=None) -> None:
        self.running: set[str] = set()
        self.generated, self.flushed = 0, 0
        self.death: BaseException | None = None
        self.model = None  # a simulated_driver.Block, whose first bytes are the buffer
        self._make_handlers(make_updater, saver or Saver(), group)
        self.handled: list = []  # requests that reached their handlers
        self._engine_paused = False
        self.server_args = types.SimpleNamespace(enable_weights_cpu_backup=True)
        self.ipc_channels = types.SimpleNamespace(send_to_tokenizer=Sent())
        self.init_request_dispatcher()

    @property
    def sent(self) -> list:
        """The messages sent to the tokenizer manager."""
        return self.ipc_channels.send_to_tokenizer.messages

    def init_request_dispatcher(self) -> None:
        self._request_dispatcher = self._dispatch

    def process_input_requests(self, requests) -> None:
        for request in requests:
            output = self._request_dispatcher(request)
            if output is not None:
                self.ipc_channels.send_to_tokenizer.send_output(output, request)

    def _dispatch_tokenized_mm_requests(self, request, errors) -> None:
        """Handle requests with images, some of which could not be read (0.5.23)."""
        for _ in errors:
            self._dispatch(request)

    def _dispatch(self, request):
        """Handle a request.

        Requests without a case in this method require all tags to be mapped.
        """
        self.handled.append(request)
        kind = type(request).__name__
        if kind in ("ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput"):
            release = kind.startswith("Release")
            name = "release_memory_occupation" if release else "resume_memory_occupation"
            return getattr(self.handlers, name)(request)
        if kind == "FlushCacheReqInput":
            return FlushCacheReqOutput(self.flush_cache())
        if kind in ("PauseGenerationReqInput", "ContinueGenerationReqInput"):
            self._engine_paused = kind.startswith("Pause")
            return None
        if kind in ("AbortReq", "GetInternalStateReq", "SlowDownReqInput"):
            return None
        needed = {"weights"} if kind.startswith("Update") else set(TAGS)
        if self.handlers.offload_tags & needed:
            self.death = RuntimeError("an illegal memory access was encountered")
            raise self.death
        if kind == "RpcReqInput":
            return messages.RpcReqOutput(True, "")
        return None

    def _make_handlers(self, make_updater, saver, group) -> None:
        self.weight_updater = self.handlers = make_updater(self, saver, group)

    def handle(self, name: str, message=None):
        """Return the answer to a message, or None if the scheduler is dead."""
        if self.death is not None:
            return None
        try:
            if name == "flush_cache":
                return FlushCacheReqOutput(self.flush_cache())
            if name == "get_internal_state":
                return self.get_internal_state(message)
            return getattr(self.handlers, name)(message)
        except Exception as error:
            self.death = error
            return None

    def begin(self, rid: str) -> None:
        if self.handlers.offload_tags:
            self.death = RuntimeError("an illegal memory access was encountered")
        self.running.add(rid)

    def end(self, rid: str) -> None:
        self.running.discard(rid)
        self.generated += 1

    def is_fully_idle(self) -> bool:
        return not self.running

    def flush_cache(self) -> bool:
        self.flushed += self.is_fully_idle()
        return self.is_fully_idle()

    def get_internal_state(self, recv_req):
        return GetInternalStateReqOutput({"last_gen_throughput": 0.0})

    def buffers(self):
        if self.model is None:
            return {"buffers": []}
        return {"buffers": [("rotary_emb.cos_sin_cache", Tensor(self.model.bytes()[:16]))]}

    def restore_buffers(self, saved) -> None:
        for _, tensor in saved["buffers"]:
            self.model.sim.write(self.model.address, tensor.data)


class OlderScheduler(Scheduler):
    """A scheduler that inherits the handlers through the mixin in its subclass."""

    def _make_handlers(self, make_updater, saver, group) -> None:
        self.handlers = self
        self.begin_awake(saver, group)
