"""Allocate memory like a Megatron trainer, and replay a framework's calls to its memory saver.

The memory saver's library is preloaded into the process, as it is in the frameworks' training
actors. All of the process's device memory is in one region, including the memory of the CUDA graph
of the training step.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, ClassVar

from engine_model import SMALL, checkpoint
from framework_steps import BACKUP, BUCKETS, COPY, FRAMEWORKS
from serve import Worker

BUCKET = 4 << 20  # bytes of weights in a request
MARGIN = 1 << 30  # miles's --train-memory-margin-bytes
RATE = 2**-10  # the amount by which a training step lowers each parameter


class TrainerWorker(Worker):
    """The operations of the trainer.

    Args:
        name: the memory saver.
        framework: the framework's name.
    """

    imports: ClassVar[tuple[str, ...]] = ("torch", "sglang")

    def __init__(self, name: str, framework: str) -> None:
        self._framework = FRAMEWORKS[framework]
        self._saver: Any = None
        if self._framework.trainer is not None:
            from torch_memory_saver import torch_memory_saver

            self._saver = torch_memory_saver
            if "TMS_DISK_BACKUP_DIR" in os.environ:
                self._saver.set_disk_backup_dir(os.environ["TMS_DISK_BACKUP_DIR"])
        self._update = contextlib.ExitStack()
        self._alive: list[Any] = []  # tensors to which requests in progress refer
        self._source = ""
        self._buckets: list[list[str]] = []

    def start(self) -> dict[str, Any]:
        """Allocate parameters, gradients and master weights, and capture the training step."""
        import torch
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        torch.manual_seed(1)
        with self._region("param_buffer"):
            self.parameters = {
                name: torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(
                    1.0 if len(size) == 1 else 0.0, 0.02
                )
                for name, size in checkpoint(SMALL)
            }
        with self._region("grad_buffer"):
            self.gradients = {
                name: torch.zeros_like(tensor) for name, tensor in self.parameters.items()
            }
        self.masters = {name: tensor.float() for name, tensor in self.parameters.items()}
        self.begins = {name: tensor.cpu() for name, tensor in self.masters.items()}
        self._steps = 0
        self._capture()
        self._copy()
        return {"parameters": sum(tensor.nbytes for tensor in self.parameters.values())}

    def call(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Perform one call, and return its duration in seconds."""
        import torch

        torch.cuda.synchronize()
        begin = time.perf_counter()
        getattr(self, f"_{call}")(**arguments)
        torch.cuda.synchronize()
        return {"seconds": round(time.perf_counter() - begin, 6)}

    def begin_update(self, source: str, disabled: bool) -> dict[str, Any]:
        """Start sending weights; return the number of requests of each kind."""
        if disabled:
            self._update.enter_context(self._saver.disable())
        self._source = source
        self._buckets = [[]]
        size = 0
        for name, tensor in self.parameters.items():
            if self._buckets[-1] and size + tensor.nbytes > BUCKET:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append(name)
            size += tensor.nbytes
        return {"buckets": len(self._buckets), "single": len(self.parameters)}

    def request(self, number: int, requests: str) -> dict[str, Any]:
        """Return the serialized weights of a request, and keep their memory until the update ends.

        The memory is still needed after the engine's reply, because the engine replies once its
        copies are queued, before they are complete.
        """
        import torch
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        names = self._buckets[number] if requests == BUCKETS else [list(self.parameters)[number]]
        tensors = [(name, self._readable(name)) for name in names]
        if requests == BUCKETS:
            bucket = FlattenedTensorBucket(named_tensors=tensors)
            data: Any = {
                "flattened_tensor": bucket.get_flattened_tensor(),
                "metadata": bucket.get_metadata(),
            }
        else:
            data = tensors[0][1]
        self._alive += [tensors, data]
        torch.cuda.synchronize()
        return {"names": names, "data": MultiprocessingSerializer.serialize(data, output_str=True)}

    def end_update(self) -> dict[str, Any]:
        """End the update."""
        import torch

        self._alive.clear()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        self._update.close()
        return {}

    def _region(self, tag: str) -> contextlib.AbstractContextManager[Any]:
        if not self._framework.tagged:
            return contextlib.nullcontext()
        region: contextlib.AbstractContextManager[Any] = self._saver.region(
            tag=tag, enable_cpu_backup=False
        )
        return region

    def _capture(self) -> None:
        """Capture a training step, which updates each master weight and its parameter."""
        import torch

        self._move()  # allocates the memory that the kernels need
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._move()
        self._steps = 1

    def _move(self) -> None:
        for name, master in self.masters.items():
            self.gradients[name].fill_(RATE)
            master.add_(self.gradients[name].float(), alpha=-1.0)
            self.parameters[name].copy_(master)

    def _train(self) -> None:
        """Replay the step, and compare all contents with those of a trainer that did not sleep."""
        import torch

        self._graph.replay()
        self._steps += 1
        for name, begin in self.begins.items():
            expected = begin.clone()
            for _ in range(self._steps):
                expected -= RATE
            if not torch.equal(self.masters[name].cpu(), expected):
                raise RuntimeError(f"the master weights of {name} differ after {self._steps} steps")
            if not torch.equal(self.parameters[name].cpu(), expected.bfloat16()):
                raise RuntimeError(f"the parameters {name} differ after {self._steps} steps")
        self._copy()

    def _copy(self) -> None:
        """Copy the parameters to the host, as miles's weights_backuper does."""
        self.copies = {name: tensor.cpu() for name, tensor in self.parameters.items()}

    def _rebuild(self) -> None:
        """Rebuild the parameters from the master weights, because the parameters had no backup."""
        for name, master in self.masters.items():
            self.parameters[name].copy_(master)

    def _readable(self, name: str) -> Any:
        """Return the parameter as a tensor on the GPU, read from the source of the update."""
        tensor = self.parameters[name]
        if self._source == COPY:
            return self.copies[name].cuda()
        if self._source == BACKUP:
            saved = self._saver.get_cpu_backup(tensor, zero_copy=True)
            if saved is None:
                raise RuntimeError(f"the saver has no backup of {name}")
            return saved.cuda()
        return tensor

    def _pause(self, tag: str | None) -> None:
        import torch

        torch.cuda.empty_cache()
        self._saver.pause(tag)

    def _resume(self, tag: str | None) -> None:
        self._saver.resume(tag)

    def _margin(self) -> None:
        self._saver.memory_margin_bytes = MARGIN

    def _exclude(self) -> None:
        """Allocate memory outside the region, as slime does for DeepEP's buffers."""
        import torch

        library = self._saver._impl._binary_wrapper.cdll
        before = library.tms_get_interesting_region()
        library.tms_set_interesting_region(False)
        try:
            self._outside = torch.ones(32 << 20, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
        finally:
            library.tms_set_interesting_region(before)
