"""What the tests of frameworks share. Each framework is its own package, where it is installed."""

from __future__ import annotations

import pytest
from installed import SGLANG, is_for_want_of_kernels, needs


@pytest.fixture
def process_group(tmp_path_factory):
    """A torch.distributed world of this process alone, as SGLang's schedulers have.

    For one test: others in this process expect that torch.distributed is not initialised.
    """
    dist = pytest.importorskip("torch.distributed")
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def engine(sim, tag, process_group):
    """An engine whose weights and KV cache are mapped; afterwards it must live."""
    needs(SGLANG, "it needs SGLang 0.5.11 or newer")
    try:
        from recipe_engine import Engine
    except ImportError as error:  # 0.5.12 wants its kernels, and they a GPU
        if not is_for_want_of_kernels(error):
            raise
        pytest.skip(f"SGLang's kernels cannot be imported: {' '.join(str(error).split())[:100]}")
    tag.names.extend(("weights", "kv_cache", "cuda_graph"))
    engine = Engine(sim)
    yield engine
    engine.close()
    assert engine.scheduler.death is None, repr(engine.scheduler.death)
    del engine.scheduler.weights, engine.scheduler.kv_cache
