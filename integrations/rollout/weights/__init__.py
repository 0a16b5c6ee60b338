"""Weight updates from a trainer to its rollout engine, on the same GPUs or on other GPUs.

    from memsaver.integrations.rollout.weights import WeightGroup, update

    update(engine, model, version="step-7")  # or engine.update_weights(model, version="step-7")

- **In buckets.** Tensors are gathered and sent in buckets of a given size. In addition to the
  model, an update needs only the memory of one bucket, even if FSDP2's shards are gathered.
- **In place.** An engine on the same GPUs reads tensors in shareable regions directly, without a
  bucket.
- **Verified.** For the tensors that `verify` selects, the engine's ranks compare the received
  contents with those that were sent and, after the load, the model's contents with the received
  ones, in the model's own layout. The comparisons are bitwise and run on the GPUs.
- **All or none.** A failure on one rank raises the same error on all ranks. Every wait is bounded.
  The trainer's weights are only read. After a failed update, an engine can contain a mix of old and
  new weights. Repeating the call updates all weights.

Importing this package imports neither torch nor an engine.
"""

from .disaggregated import WeightGroup
from .megatron import megatron_parts
from .parts import Part
from .report import WeightUpdate
from .updates import update

__all__ = ["Part", "WeightGroup", "WeightUpdate", "megatron_parts", "update"]
