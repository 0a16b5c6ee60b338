"""Tests releases of released tags and resumes of mapped tags if SGLang reports such calls as
errors."""

from __future__ import annotations

from dataclasses import dataclass

import fake_sglang
import pytest
import scheduler_calls
from scheduler_calls import states

import memsaver
from memsaver import InvalidStateError
from memsaver.integrations.engine.messages import error_of
from memsaver.integrations.sglang import SleepController
from memsaver.integrations.sglang.protocol import FORGIVING, IDLE, STRICT, answers_of


@dataclass
class Reply:
    """The reply to a release or resume in SGLang's pull request 24123."""

    rid: str | None = None
    http_worker_ipc: str | None = None
    success: bool = True
    message: str = ""


@pytest.fixture
def reports(sglang, monkeypatch):
    """Install reply classes that report the outcome."""
    from sglang.srt.managers import io_struct

    for operation in ("Release", "Resume"):
        monkeypatch.setattr(io_struct, f"{operation}MemoryOccupationReqOutput", Reply)


@pytest.fixture
def main_process(sglang, engine):
    made = fake_sglang.Engine(sglang.Tokenizer([engine]))
    yield made
    made.shutdown()


def call(main_process, operation, tags=None, rid=None):
    """Call the interface of `main_process`, as SGLang's `Engine` does."""
    kind = {
        "release": fake_sglang.ReleaseMemoryOccupationReqInput,
        "resume": fake_sglang.ResumeMemoryOccupationReqInput,
    }[operation]
    method = getattr(main_process.tokenizer_manager, f"{operation}_memory_occupation")
    return main_process.loop.run_until_complete(method(kind(tags=tags, rid=rid), None))


@pytest.mark.parametrize(
    ("released", "operation", "tags", "text"),
    [
        ([], "resume", ["kv_cache"], "kv_cache is not currently released"),
        ([], "resume", None, "weights, kv_cache are not currently released"),
        (["kv_cache"], "resume", ["weights"], "weights is not currently released"),
        (["kv_cache"], "resume", ["kv_cache", "weights"], "weights is not currently released"),
        (["kv_cache"], "release", ["kv_cache"], "kv_cache is already released"),
        (["kv_cache"], "release", ["kv_cache", "weights"], "kv_cache is already released"),
    ],
)
def test_a_call_for_a_tag_in_the_requested_state_changes_nothing(
    reports, main_process, engine, released, operation, tags, text
):
    if released:
        call(main_process, "release", released)
    before = states()
    with pytest.raises(RuntimeError, match=text) as caught:
        call(main_process, operation, tags)
    assert isinstance(caught.value, InvalidStateError) and states() == before
    if released:
        call(main_process, "resume", released)
    assert engine.model.is_intact()


def test_a_call_for_all_tags_is_for_those_that_remain(reports, main_process, sim, engine):
    call(main_process, "release", ["kv_cache"])
    call(main_process, "release")
    assert sim.tag_bytes() == 0
    with pytest.raises(RuntimeError, match="already released"):
        call(main_process, "release")
    call(main_process, "resume", ["weights"])
    call(main_process, "resume")
    assert set(states().values()) == {"mapped"} and engine.model.is_intact()


@pytest.mark.parametrize("then", ["resume", "release"])
def test_tags_that_still_have_memory_may_be_resumed_or_released(
    reports, main_process, engine, sim, then
):
    call(main_process, "release")
    engine.weight_updater.resume_errors["after kv_cache"] = RuntimeError("no queue")
    with sim.fault("cuMemUnmap"), pytest.raises(RuntimeError, match="could not release it"):
        call(main_process, "resume")
    assert sim.tag_bytes() > 0
    engine.weight_updater.resume_errors.clear()
    call(main_process, then)
    if then == "release":
        assert sim.tag_bytes() == 0
        call(main_process, "resume")
    assert set(states().values()) == {"mapped"} and engine.model.is_intact()


def test_success_is_reported_to_the_main_process(reports, engine):
    request = fake_sglang.ReleaseMemoryOccupationReqInput(["kv_cache"], STRICT)
    first = engine.handle("release_memory_occupation", request)
    second = engine.handle("release_memory_occupation", request)
    assert (first.success, first.message) == (True, "")
    assert not second.success and "kv_cache is already released" in second.message
    (answer,) = answers_of([second])
    assert type(error_of([answer])) is InvalidStateError and answer.released == ("kv_cache",)


def test_a_controller_may_repeat_its_calls(reports, main_process, engine):
    controller = SleepController(main_process)
    controller.sleep()
    controller.sleep()
    call(main_process, "release", ["kv_cache"], rid=FORGIVING)
    controller.wake_up("weights")
    controller.wake_up()
    controller.wake_up()
    assert set(states().values()) == {"mapped"} and engine.model.is_intact()


def test_an_idle_main_process_may_sleep_after_a_partial_release(reports, engine):
    scheduler_calls.ask(engine, "release", ["kv_cache"])
    assert scheduler_calls.ask(engine, "release").failure is None


def test_other_versions_accept_repeated_releases_and_resumes(main_process, engine):
    for operation in ("resume", "release", "release", "resume", "resume"):
        call(main_process, operation, ["kv_cache", "weights"])
    assert set(states().values()) == {"mapped"} and engine.model.is_intact()


def test_a_call_that_fails_is_in_the_log(main_process, engine, sim, caplog):
    """The caller receives the error, but another program might be the one that logs it."""
    call(main_process, "release")
    sim.occupy(memsaver.device_memory(0)[0])
    for operation, tags, text in (("resume", None, "out of memory"), ("release", ["x"], "tag 'x'")):
        with pytest.raises(memsaver.MemsaverError, match=text):
            call(main_process, operation, tags)
        assert f"a {operation} of memory failed: " in caplog.text and text in caplog.text
    sim.occupy(0)
    call(main_process, "resume")


@pytest.mark.timeout(30)
def test_a_client_that_uses_the_mark_of_an_idle_release_is_answered(main_process):
    (answer,) = call(main_process, "release", ["kv_cache"], IDLE)
    assert answer.failure is None and answer.tags == ("kv_cache",)
    assert states()["kv_cache"] == "paused"
    call(main_process, "resume", ["kv_cache"], IDLE)
    assert states()["kv_cache"] == "mapped"
