"""Checks that vLLM adds to its worker class and that run in vLLM's workers."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from pathlib import Path
from typing import Any

MIB = 1 << 20


class Checks:
    """Methods for `worker_extension_cls`, which `collective_rpc` calls by name."""

    def check_pid(self) -> int:
        """Return the worker's pid."""
        return os.getpid()

    def check_tags(self) -> dict[str, int]:
        """Return the resident bytes of each memsaver tag."""
        import memsaver

        return {one.tag: one.resident_bytes for one in memsaver.stats().tags}

    def check_runtime_state(self) -> dict[str, int]:
        """Return the checksum of each tensor in the tag `runtime`, by address."""
        import torch

        gc.unfreeze()  # vLLM freezes the objects of its start, which are then not listed
        kinds = (torch.Tensor, torch.nn.Parameter)  # and no tensors without memory
        found = [one for one in gc.get_objects() if type(one) in kinds and one.is_cuda]
        return {
            str(one.data_ptr()): int(one.reshape(-1).view(torch.uint8).long().sum())
            for one in found
            if one.numel() and _is_in("runtime", one)
        }

    def check_host_bytes(self) -> int:
        """Return the resident host memory of the worker process."""
        return host_bytes()

    def check_settings(self) -> dict[str, bool]:
        """Return whether the V2 model runner is in use, and whether torch uses expandable
        segments.
        """
        import torch

        worker: Any = self
        expands = any(one["is_expandable"] for one in torch.cuda.memory_snapshot())
        return {"uses_v2": bool(worker.use_v2_model_runner), "expands": expands}

    def check_graphs(self) -> int:
        """Return the number of captured CUDA graphs."""
        import torch

        gc.unfreeze()  # vLLM freezes the objects of its start, which are then not listed
        return sum(isinstance(found, torch.cuda.CUDAGraph) for found in gc.get_objects())

    def check_reload_draft(self) -> None:
        """Load the weights of the draft model from its checkpoint."""
        from vllm.model_executor.model_loader import get_model_loader

        worker: Any = self
        draft = worker.get_draft_model()
        loader = get_model_loader(worker.vllm_config.load_config)
        config = worker.vllm_config.speculative_config.draft_model_config
        draft.load_weights(loader.get_all_weights(config, draft))

    def check_reload_adapted(self) -> None:
        """Load the weights of a model whose layers are wrapped for LoRA, which vLLM's own reload
        rejects.
        """
        from vllm.model_executor.model_loader import get_model_loader

        from memsaver.integrations.engine.weights.adapters import without_adapters

        worker: Any = self
        model = worker.model_runner.get_model()
        loader = get_model_loader(worker.vllm_config.load_config)
        with without_adapters(model):
            model.load_weights(loader.get_all_weights(worker.model_config, model))

    def check_out_of_memory(self) -> None:
        """A failed allocation in a pool raises an error; later allocations inside and outside it
        succeed.
        """
        import torch

        total = torch.cuda.mem_get_info()[1]
        for _ in range(3):
            try:
                _allocate("weights", 2 * total)
            except torch.OutOfMemoryError:
                pass
            else:
                raise AssertionError("twice the GPU's memory was allocated")
        inside, outside = _allocate("weights", 64 * MIB), torch.full((MIB,), 7, device="cuda")
        inside.fill_(5)
        assert bool((inside == 5).all()) and bool((outside == 7).all())
        assert _is_in("weights", inside) and not _is_in("weights", outside)
        torch.cuda.synchronize()

    def check_exception_in_the_pool(self) -> None:
        """An exception ends the pool's block, and later tensors are not in the tag."""
        import torch
        from vllm.device_allocator import get_mem_allocator_instance

        with contextlib.suppress(KeyError):
            with get_mem_allocator_instance().use_memory_pool(tag="kv_cache"):
                inside = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
                raise KeyError
        outside = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        assert _is_in("kv_cache", inside) and not _is_in("kv_cache", outside)

    def check_hold(self, tag: str, nbytes: int) -> None:
        """Allocate a tensor in a tag and keep a reference to it."""
        self._check_held = _allocate(tag, nbytes).fill_(9)

    def check_drop(self) -> None:
        """Free the tensor that `check_hold` allocated."""
        del self._check_held
        gc.collect()

    def check_sum(self) -> int:
        """Return a checksum of the tensor that `check_hold` allocated."""
        return int(self._check_held.sum(dtype=self._check_held.long().dtype))


def host_bytes() -> int:
    """Return the resident host memory of this process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def _allocate(tag: str, nbytes: int) -> Any:
    import torch
    from vllm.device_allocator import get_mem_allocator_instance

    with get_mem_allocator_instance().use_memory_pool(tag=tag):
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def _is_in(tag: str, tensor: Any) -> bool:
    import memsaver

    at = tensor.data_ptr()
    return any(one.address <= at < one.address + one.bytes for one in memsaver.ranges(tag))
