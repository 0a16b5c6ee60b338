"""New weights from a trainer to its rollout engine, on the same GPUs or on others.

    from memsaver.integrations.rollout.weights import WeightGroup, update

    update(engine, model, version="step-7")  # or engine.update_weights(model, version="step-7")

- **In buckets.** Tensors are gathered and sent in buckets of a given size, so that an update takes
  the memory of one of them beside the model; of FSDP2's shards, never more is whole at a time.
- **Verified.** What the engine's ranks got is compared with what was sent, and what the model holds
  then with what it got, in whatever layout it has it; on the GPUs, bit for bit.
- **All or none.** What fails on a rank is the same error on all of them, and no wait is unbounded.
  The trainer's weights are only read. An engine whose update failed has old and new weights: the
  same call, made again, gives it the new ones.

Importing this imports neither torch nor an engine.
"""

from memsaver.integrations.rollout.weights.disaggregated import WeightGroup
from memsaver.integrations.rollout.weights.report import WeightUpdate
from memsaver.integrations.rollout.weights.updates import update

__all__ = ["WeightGroup", "WeightUpdate", "update"]
