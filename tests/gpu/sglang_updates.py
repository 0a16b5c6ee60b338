"""Scenarios with weights without a backup, which a trainer sends between the stages of a wake-up.

A scenario begins and ends with the engine awake; if it raises, the engine is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import qwen_model
from sglang_checks import check_output, gives_back, sleep
from sglang_engines import Session

from memsaver.integrations.engine.reports import SleepReport


def weights_are_gone_without_an_update(session: Session) -> None:
    """A sleep discards weights without a backup, and an update restores them."""
    reports: list[SleepReport] = []
    with gives_back(session, reports):
        reports.append(sleep(session))
    assert sum(r.copied_bytes.get("weights", 0) for s in reports[0].steps for r in s.ranks) == 0
    session.controller.wake_up()
    garbage = session.outputs()
    assert all(found != known for found, known in zip(garbage, session.expected, strict=True))
    session.settle()
    update_from_gpu_tensors(session)


def update_from_gpu_tensors(session: Session) -> None:
    """A trainer on the same GPU can send its GPU tensors."""
    updates(session, lambda part: [(name, tensor.cuda()) for name, tensor in part.items()])


def update_from_another_gpu(session: Session) -> None:
    """A trainer on a GPU that the engine does not use can send its GPU tensors."""
    other = f"cuda:{session.gpus}"
    updates(session, lambda part: [(name, tensor.to(other)) for name, tensor in part.items()])


def update_from_host_tensors(session: Session) -> None:
    """A trainer can send tensors in host memory."""
    updates(session, lambda part: [(name, tensor.clone()) for name, tensor in part.items()])


def update_from_buckets(session: Session) -> None:
    """A trainer can send many small tensors in a flattened bucket."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    kept: list[Any] = []  # alive while the engine reads them

    def bucket(part: dict[str, Any]) -> list[Any]:
        made = FlattenedTensorBucket([(name, tensor.cuda()) for name, tensor in part.items()])
        kept.append(made)
        contents = {
            "flattened_tensor": made.get_flattened_tensor(),
            "metadata": made.get_metadata(),
        }
        return [
            MultiprocessingSerializer.serialize(contents, output_str=True)
            for _ in range(session.gpus)
        ]

    updates(session, bucket, load_format="flattened_bucket")


def updates(session: Session, sent: Callable[[dict[str, Any]], Any], **options: Any) -> None:
    """Send new weights between a wake-up's stages, then restore the old weights in the same way."""
    other = qwen_model.weights(seed=2)
    for weights in (other, session.weights):
        sleep(session)
        with session.controller.staged_wake():
            session.controller.check("update_weights")
            for number, part in enumerate(weights):
                done, message = session.engine.update_weights_from_tensor(
                    sent(part), flush_cache=number == len(weights) - 1, **options
                )
                assert done, message
        if weights is other:
            found = session.outputs()
            assert all(new != old for new, old in zip(found, session.expected, strict=True))
    check_output(session)
