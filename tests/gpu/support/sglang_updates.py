"""Scenarios in which a trainer sends weights to an engine during a wake-up or while it is awake.

The engine is awake at the start and end of each scenario. If a scenario raises an exception, the
engine is replaced.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import qwen_model
from program_runs import free_port
from sglang_checks import check_output, gives_back, sleep
from sglang_engines import Session, request

from memsaver.integrations.engine.reports import SleepReport

GOOD = "model.layers.0.input_layernorm.weight"
PROJECTION = "model.layers.0.self_attn.q_proj.weight"
FAILED = "the update failed on rank {}"

Named = list[tuple[str, Any]]
Answer = tuple[bool, str]
Way = Callable[[Named], Answer]  # sends tensors on the CPU


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
    """A trainer can send many small tensors in one flattened bucket."""
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
            for _ in range(session.ranks)
        ]

    updates(session, bucket, load_format="flattened_bucket")


def updates(session: Session, sent: Callable[[dict[str, Any]], Any], **options: Any) -> None:
    """Send new weights between the stages of a wake-up, then restore the old weights in the same
    way.
    """
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


def plain_updates_that_fail(session: Session) -> None:
    """An update with a bad name, shape or loader returns an error, and the engine still works."""
    done, message = session.engine.update_weights_from_tensor(
        [], load_format="a_loader.that_is_missing"
    )
    assert not done and "the update failed" in message, message
    with broadcasts(session) as broadcast:
        for what, send in {**tensor_ways(session), **broadcast}.items():
            fail = "Failed to update" if what in broadcast else FAILED
            check_updates(session, what, send, fail)


def http_updates_that_fail(session: Session) -> None:
    """A server answers a bad update with an error and still works."""
    for what, send in tensor_ways(session).items():
        check_updates(session, what, send, FAILED)


def disk_updates_that_fail(session: Session) -> None:
    """A missing checkpoint or a wrong shape causes an error, and the engine still works."""
    folder, other = session.log.parent, qwen_model.weights(seed=2)
    qwen_model.save(folder / "other", other)
    wrong = [dict(part) for part in other]
    wrong[0][PROJECTION] = wrong[0][PROJECTION][1:]
    qwen_model.save(folder / "wrong", wrong)
    for _ in range(2):
        for name in ("missing", "wrong"):
            done, message = update_from_disk(session, folder / name)
            assert not done and "failed" in message.lower(), (name, message)
        for name in ("other", "model"):
            done, message = update_from_disk(session, folder / name)
            assert done, (name, message)
            check_weights(session, "disk", is_old=name == "model")


def update_from_disk(session: Session, model: Path) -> Answer:
    """Load a checkpoint through a request to the server or a call to the engine."""
    if session.url:
        payload = {"model_path": str(model)}
        return answer_of(*request(session.url, "/update_weights_from_disk", payload))
    done, message, *_ = session.engine.update_weights_from_disk(str(model))
    return done, message


def answer_of(status: int, text: str) -> Answer:
    """Return the answer contained in a server's response to an update."""
    assert status in (200, 400), (status, text)
    reply = json.loads(text)
    return status == 200 and reply["success"], reply["message"]


def check_updates(session: Session, what: str, send: Way, fail: str) -> None:
    """Check updates with bad tensors, then with new weights, then with the old weights.

    Args:
        session: the engine.
        what: how the tensors are sent, for messages.
        send: a function that sends an update.
        fail: a part of the error's message if the model's loader raises an error; {} stands for the
            rank number.
    """
    check_failures(session, what, send, fail)
    seconds = []
    for weights in (qwen_model.weights(seed=2), session.weights):
        started = time.perf_counter()
        for part in weights:
            done, message = send([*part.items()])
            assert done, (what, message)
        seconds.append(round(time.perf_counter() - started, 3))
        check_weights(session, what, is_old=weights is session.weights)
    print(f"{what}: updates took {seconds} s; the first watches the loader", flush=True)


def check_weights(session: Session, what: str, *, is_old: bool) -> None:
    """Check that all outputs are those of the first weights (`is_old`), or that no output is."""
    session.settle()
    found = session.outputs()
    same = [new == old for new, old in zip(found, session.expected, strict=True)]
    assert same == [is_old] * len(found), (what, found)


def check_failures(session: Session, what: str, send: Way, fail: str) -> None:
    """Check that updates with one bad tensor return errors; see `check_updates`."""
    import torch

    like = session.weights[0][PROJECTION]
    rows, columns = like.shape
    cases = [
        (PROJECTION.replace("q_proj", "qq_proj"), (rows, columns), fail.format(0)),
        (PROJECTION, (rows, columns // 2), fail.format(0)),
        ("model.norm.weight", (3,), fail.format(session.stages - 1)),  # in the last stage
    ]
    unknown = "model.layers.9.nothing.weight"
    cases.append((unknown, (rows, columns), f"does not use {unknown}"))
    cases.append((PROJECTION, (2 * rows, columns), "only a part of"))
    for name, shape, text in cases:
        tensor = torch.zeros(shape, dtype=like.dtype)
        done, message = send([(GOOD, session.weights[0][GOOD]), (name, tensor)])
        assert not done and text in message, (what, name, shape, done, message)


def tensor_ways(session: Session) -> dict[str, Way]:
    """Return the ways to send tensors in a request with a payload for each rank."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    def send(contents: Any, load_format: str | None = None) -> Answer:
        payloads = [
            MultiprocessingSerializer.serialize(contents, output_str=bool(session.url))
            for _ in range(session.ranks)
        ]
        named = {"serialized_named_tensors": payloads, "load_format": load_format}
        if session.url:
            return answer_of(*request(session.url, "/update_weights_from_tensor", named))
        made = UpdateWeightsFromTensorReqInput(**named)
        update = session.engine.tokenizer_manager.update_weights_from_tensor
        return session.run(lambda: update(made, None))  # type: ignore[no-any-return]

    def send_bucket(named: Named) -> Answer:
        bucket = FlattenedTensorBucket([(name, tensor.cuda()) for name, tensor in named])
        flat, metadata = bucket.get_flattened_tensor(), bucket.get_metadata()
        return send({"flattened_tensor": flat, "metadata": metadata}, "flattened_bucket")

    ways: dict[str, Way] = {
        "GPU tensors": lambda named: send([(name, tensor.cuda()) for name, tensor in named]),
        "bucket": send_bucket,
    }
    if not session.url:  # torch shares host tensors only with processes that have its key
        ways["host tensors"] = lambda named: send([(name, one.clone()) for name, one in named])
    return ways


@contextlib.contextmanager
def broadcasts(session: Session) -> Iterator[dict[str, Way]]:
    """Join a gloo group with the engine's ranks; yield the ways to broadcast tensors in this
    group.
    """
    import torch.distributed as dist
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    engine, name, size, port = session.engine, "plain", 1 + session.ranks, free_port()
    with ThreadPoolExecutor(1) as trainer:
        joined = trainer.submit(
            init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=size,
            rank=0,
            group_name=name,
        )
        done, message = engine.init_weights_update_group(
            "127.0.0.1", port, 1, size, name, backend="gloo"
        )
        assert done, message
        group = joined.result(60)

        def broadcast(tensors: list[Any]) -> None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0, group=group)

        def send(named: Named, load_format: str | None = None) -> Answer:
            tensors = [tensor for _, tensor in named]
            if load_format:
                tensors = [FlattenedTensorBucket(named).get_flattened_tensor()]
            sent = trainer.submit(broadcast, tensors)
            answer: Answer = engine.update_weights_from_distributed(
                [name for name, _ in named],
                [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
                [list(tensor.shape) for _, tensor in named],
                name,
                load_format=load_format,
            )
            sent.result(60)
            return answer

        yield {
            "broadcast": send,
            "broadcast bucket": lambda named: send(named, "flattened_bucket"),
        }
        done, message = engine.destroy_weights_update_group(name)
        assert done, message
        dist.destroy_process_group(group)
