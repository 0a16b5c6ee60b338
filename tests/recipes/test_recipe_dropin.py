"""Tests SGLang's own saver and handlers, without plugins, with memsaver's package
torch_memory_saver.

This combination occurs with SGLang before 0.5.11 or with memsaver's plugin disabled.
"""

from __future__ import annotations

import pytest
from installed import needs

pytestmark = pytest.mark.recipes

ENGINE = """
import absent_packages
absent_packages.install()
import torch
import contextlib
import torch.distributed as dist
from types import SimpleNamespace
from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput as Release,
    ResumeMemoryOccupationReqInput as Resume,
)
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

import recipe_updater

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
adapter = TorchMemorySaverAdapter.create(enable=True)
assert type(adapter).__module__ == "sglang.srt.utils.torch_memory_saver_adapter"
model = torch.nn.Module()
model.register_buffer("cos_sin_cache", torch.arange(8.0))
parts = dict(
    tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
    draft_worker=None,
    memory_saver_adapter=adapter,
    flush_cache=lambda *_, **__: True,
    is_fully_idle=lambda *_, **__: True,
)
stack = contextlib.ExitStack()
stack.enter_context(recipe_updater.published())
if recipe_updater.weight_updater is not None:
    engine = recipe_updater.updater_of(**parts)
else:
    engine = recipe_updater.Mixin()
    vars(engine).update(
        parts, tp_cpu_group=None, offload_tags=set(), _is_no_request=lambda: True
    )

with adapter.region("weights", enable_cpu_backup=True):
    weights = block(1)
with adapter.region("kv_cache"):
    cache = block(2)
"""

# The requests of each framework, in order.
SEQUENCES = {
    "verl": [
        ("Release", ["kv_cache", "weights"]),
        ("Resume", ["weights"]),
        ("Resume", ["kv_cache"]),
    ],
    "slime": [("Release", None), ("Resume", ["weights"]), ("Resume", ["kv_cache", "cuda_graph"])],
    "xtuner": [("Release", None), ("Resume", ["weights"]), ("Resume", ["kv_cache"])],
}


def test_released_memory_is_free_and_resumable_and_children_are_preloaded(request):
    """The children are started in the same way as SGLang's schedulers."""
    needs("sglang", "make recipes")
    run_dropin = request.getfixturevalue("run_dropin")
    run_dropin(
        ENGINE
        + f"""
full = used()
for sequence in {list(SEQUENCES.values())}:
    for _ in range(2):
        cache.array[:] = bytes([2]) * cache.nbytes
        for kind, tags in sequence:
            if kind == "Release":
                engine.release_memory_occupation(Release(tags=tags))
                assert full - used() >= 6 * MIB, used()
            else:
                engine.resume_memory_occupation(Resume(tags=tags))
        assert used() == full and reads(weights, 1) and reads(cache, 0)
with adapter.configure_subprocess():
    code = "import memsaver; assert memsaver.is_preloaded()"
    subprocess.run([sys.executable, "-c", code], check=True)
assert "LD_PRELOAD" not in os.environ
        """,
        timeout=110,  # SGLang's imports take long
        MEMSAVER_SGLANG="0",
    )
