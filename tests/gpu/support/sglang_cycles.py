"""Scenarios that put a live engine to sleep and wake it; the engine's weights have a backup.

The engine is awake at the start and end of each scenario. If a scenario raises an exception, the
engine is replaced.
"""

from __future__ import annotations

import os
import re
from collections import Counter

from expected_errors import raises
from gpu_trainer import GIB, MIB, Trainer
from sglang_checks import (
    EVERY,
    ROOM,
    check_output,
    check_refusal,
    gives_back,
    sleep,
)
from sglang_engines import PROMPTS, SLACK, Session, greedy

from memsaver.errors import InvalidStateError, OutOfDeviceMemoryError
from memsaver.integrations.engine.nccl import loaded
from memsaver.integrations.engine.reports import SleepReport
from memsaver.integrations.engine.status import Status


def active_in_every_process(session: Session) -> None:
    """Each SGLang process that uses a GPU loads memsaver and logs one line about it."""
    assert session.controller.guarded and session.controller.status is Status.AWAKE
    report = sleep(session)
    session.controller.wake_up()
    ranks = {rank.pid for step in report.steps for rank in step.ranks}
    assert len(ranks) == session.ranks
    lines = re.findall(
        r"memsaver \S+ is SGLang's memory saver in process (\d+) \((.*)\)",
        session.log.read_text(errors="replace"),
    )
    said = Counter(int(pid) for pid, _ in lines)
    assert ranks <= set(said), (ranks, lines)
    assert set(said.values()) == {1}, lines
    assert {how for _, how in lines} == {"torch mode, with CUDA graphs"}, lines
    check_output(session)


def two_stages(session: Session) -> None:
    """The KV cache and the weights are released and resumed separately; the weights are resumed
    first.
    """
    controller, reports = session.controller, []
    with gives_back(session, reports):
        reports.append(sleep(session, "kv_cache"))
        assert controller.status is Status.WEIGHTS_ONLY
        reports.append(sleep(session, "weights"))
    assert controller.status is Status.ASLEEP
    assert [report.changed for report in reports] == [("kv_cache",), ("weights",)]
    with raises(InvalidStateError):
        controller.generate(input_ids=PROMPTS[0], sampling_params=greedy(1))
    with controller.staged_wake() as woken:
        assert controller.status is Status.WEIGHTS_ONLY
        with raises(InvalidStateError):
            controller.generate(input_ids=PROMPTS[0], sampling_params=greedy(1))
    assert [report.changed for report in woken] == [("weights",), ("kv_cache",)]
    copied = sum(r.copied_bytes.get("weights", 0) for s in woken[0].steps for r in s.ranks)
    assert copied >= 0.9 * 2 * sum(t.numel() for part in session.weights for t in part.values())
    assert controller.status is Status.AWAKE
    check_output(session)


def weights_alone(session: Session) -> None:
    """A sleep that releases only the weights keeps the KV cache and its cached prefixes."""
    controller, reports = session.controller, []

    def generate() -> tuple[int, list[int]]:
        answer = controller.generate(input_ids=PROMPTS[2], sampling_params=greedy(8))
        return answer["meta_info"]["cached_tokens"], answer["output_ids"]

    generate()
    cached = generate()
    one = len(session.replicas) == 1  # otherwise another replica may answer
    assert cached[0] > 0 or not one
    with gives_back(session, reports):
        reports.append(sleep(session, "weights"))
    assert controller.status is Status.NO_WEIGHTS
    controller.wake_up()
    assert generate() == cached or not one
    session.settle()
    check_output(session)


def graphs_too(session: Session) -> None:
    """All three tags are released; after the wake-up, the graphs compute the same results."""
    controller, reports = session.controller, []
    with gives_back(session, reports):
        reports.append(sleep(session))
    assert controller.released == EVERY and set(reports[0].changed) == EVERY
    assert all(r.device_bytes["cuda_graph"] > 0 for s in reports[0].steps for r in s.ranks)
    assert set(controller.wake_up().changed) == EVERY
    assert controller.status is Status.AWAKE
    check_output(session)

    sleep(session, "cuda_graph")
    assert controller.status is Status.NO_GRAPHS
    with raises(InvalidStateError):
        controller.generate(input_ids=PROMPTS[0], sampling_params=greedy(1))
    controller.wake_up()
    session.settle()
    check_output(session)


def little_stays(session: Session) -> None:
    """The sleep report names the owners of the remaining memory, little of which belongs to
    torch.
    """
    report = sleep(session)
    ranks = [rank for step in report.steps for rank in step.ranks]
    assert len(ranks) == session.ranks, ranks
    nccl, suspends = loaded(), os.environ.get("MEMSAVER_SGLANG_SUSPEND_NCCL") == "1"
    for rank in ranks:
        held = rank.held
        assert held["tags"] == 0 and held["graphs"] <= 64 * MIB, held
        assert held["cache"] <= 32 * MIB and held["tensors"] <= 512 * MIB, held
        if "context" in held:
            assert 256 * MIB < held["context"] < 2 * GIB, held
        else:  # NVML does not report the process
            assert held["rest"] > 0, held
        if suspends and nccl is not None and nccl.can_suspend:
            assert held["nccl"] <= 64 * MIB, held
    session.controller.wake_up()
    check_output(session)


def five_cycles_with_a_trainer(session: Session) -> None:
    """In each cycle, a trainer overwrites the released memory; the output is unchanged and nothing
    leaks.
    """
    after: list[list[int]] = []
    for cycle in range(5):
        reports: list[SleepReport] = []
        before = session.free()
        with gives_back(session, reports):
            reports.append(sleep(session))
        pattern = 0x5A5A5A5A5A5A5A5A + cycle
        trainers = [Trainer(gpu, GIB, pattern) for gpu in range(session.gpus)]
        given = sum(trainer.bytes for trainer in trainers)
        most = sum(before) + reports[0].bytes
        assert given >= most - 0.02 * reports[0].bytes - session.gpus * 3 * GIB, (given, most)
        assert all(trainer.is_intact() for trainer in trainers)
        for trainer in trainers:
            trainer.free()
        session.controller.wake_up()
        check_output(session)
        session.settle()
        after.append(session.free())
    lost = [first - last for first, last in zip(after[0], after[-1], strict=True)]
    assert max(lost) < 64 * MIB, f"free memory after each cycle: {after}"


def a_wake_that_does_not_fit(session: Session) -> None:
    """If a trainer occupies the last GPU's memory, a wake-up fails and no other rank resumes."""
    controller = session.controller
    sleep(session)
    last = session.gpus - 1
    trainer = Trainer(last, ROOM, pattern=7)
    before = session.free()
    with raises(OutOfDeviceMemoryError) as caught:
        controller.wake_up()
    check_refusal(session, caught[0], before, last)
    assert controller.released == EVERY and controller.status is Status.ASLEEP
    assert trainer.is_intact()

    controller.wake_up("weights")  # these fit
    before = session.free()
    with raises(OutOfDeviceMemoryError) as caught:
        controller.wake_up()
    check_refusal(session, caught[0], before, last)
    if session.engine is not None:
        with raises(OutOfDeviceMemoryError) as caught:
            session.engine.resume_memory_occupation(tags=["kv_cache"])
        check_refusal(session, caught[0], before, last)
    assert controller.refresh() is Status.WEIGHTS_ONLY
    with raises(InvalidStateError):
        controller.generate(input_ids=PROMPTS[0], sampling_params=greedy(1))
    assert trainer.is_intact()
    trainer.free()
    assert set(controller.wake_up().changed) == {"kv_cache", "cuda_graph"}
    check_output(session)


def a_wake_that_does_not_fit_one_replica(session: Session) -> None:
    """If the memory of one replica is occupied, a wake-up fails and the other replica also stays
    asleep.
    """
    controller = session.controller
    sleep(session)
    trainer = Trainer(session.gpus - 1, ROOM, pattern=7)
    asleep = session.free()
    with raises(OutOfDeviceMemoryError) as caught:
        controller.wake_up()
    assert "kv_cache" in str(caught[0]) and "free memory" in str(caught[0]), str(caught[0])
    assert controller.released == EVERY and controller.status is Status.ASLEEP
    lost = [before - now for before, now in zip(asleep, session.free(), strict=True)]
    assert max(lost) < SLACK, lost
    with raises(InvalidStateError):
        controller.generate(input_ids=PROMPTS[0], sampling_params=greedy(1))
    assert trainer.is_intact()
    trainer.free()
    controller.wake_up()
    assert controller.status is Status.AWAKE
    check_output(session)
