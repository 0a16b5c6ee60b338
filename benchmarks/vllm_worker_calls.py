"""Methods that vLLM adds to the worker class of a measured engine."""

from __future__ import annotations

import hashlib
import sys
from typing import Any


class WorkerCalls:
    """Methods for `worker_extension_cls`, which `collective_rpc` calls by name."""

    def bench_randomize(self, seed: int) -> None:
        """Replace the weights with random numbers of the magnitude of trained weights.

        vLLM's dummy weights are so small that all prompts have the same output.
        """
        import torch

        model = self.get_model()  # type: ignore[attr-defined]
        random = torch.Generator(next(model.parameters()).device).manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 1:
                    weight.normal_(1.0, 0.1, generator=random)
                else:
                    scale = 1.0 if "embed" in name else weight.shape[1] ** -0.5
                    weight.normal_(0.0, scale, generator=random)

    def bench_change(self) -> None:
        """Change the lowest bit of every weight in place; a second call restores the weights."""
        import torch

        for weight in self.get_model().parameters():  # type: ignore[attr-defined]
            weight.data.view(torch.int16).bitwise_xor_(1)
        _synchronize()

    def bench_checksum(self) -> str:
        """Return a checksum of this worker's weights."""
        import torch

        sums = [
            weight.data.view(torch.int16).sum(dtype=torch.int64)
            for weight in self.get_model().parameters()  # type: ignore[attr-defined]
        ]
        return hashlib.sha256(str(torch.stack(sums).tolist()).encode()).hexdigest()

    def bench_tag_bytes(self, tags: list[str]) -> dict[str, int]:
        """Return the bytes of memsaver's allocations with each tag."""
        import memsaver

        rows = memsaver.stats().tags
        return {tag: sum(row.allocated_bytes for row in rows if row.tag == tag) for tag in tags}

    def bench_held(self) -> dict[str, Any]:
        """Return the bytes that memsaver and vLLM's own allocator have allocated."""
        ours = theirs = 0
        if "memsaver" in sys.modules:
            import memsaver

            ours = memsaver.stats().resident_bytes
        own = sys.modules.get("vllm.device_allocator.cumem")
        owner = getattr(own, "CuMemAllocator", None)
        if owner is not None and type(owner.instance) is owner:
            theirs = sum(data.handle[1] for data in owner.instance.pointer_to_data.values())
        return {"memsaver": ours, "vllm": theirs}


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
