"""Tests release and resume in the scheduler, on the simulated driver, with a fake's handlers."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import fake_sglang
import pytest
from looks import held
from scheduler_calls import ask, states

import memsaver
from memsaver import simulator
from memsaver._memory.sharing.wire import domain
from memsaver._runtime.native import PartName
from memsaver.integrations.engine import moves
from memsaver.integrations.engine.errors import EngineBusyError
from memsaver.integrations.engine.messages import Failure, RankReport, SchedulerState, error_of
from memsaver.integrations.sglang import handlers, hooks, lost_weights
from memsaver.integrations.sglang.protocol import REWRITTEN, answers_of

MIB = 1 << 20


@pytest.fixture(params=fake_sglang.HANDLERS)
def version(request):
    return request.param


def test_release_and_resume_report_the_bytes_of_each_tag(engine, sim):
    before = sim.tag_bytes()
    answer = ask(engine, "release")
    assert answer.failure is None and set(answer.released) == set(fake_sglang.TAGS)
    (rank,) = answer.ranks
    assert rank.device_bytes["kv_cache"] >= 8 * MIB and rank.device_bytes["weights"] >= 4 * MIB
    assert rank.bytes == before and sim.tag_bytes() == 0
    assert rank.copied_bytes["kv_cache"] == 0 and rank.copied_bytes["weights"] >= 4 * MIB
    assert rank.seconds > 0

    answer = ask(engine, "resume", ["weights"])
    assert set(answer.released) == {"kv_cache", "cuda_graph"}
    assert engine.model.is_intact()
    answer = ask(engine, "resume")
    assert set(answer.tags) == {"kv_cache", "cuda_graph"} and answer.released == ()
    assert engine.kv.is_zero() and engine.graph.is_intact()


def test_arguments_by_name_are_those_by_position(engine):
    updater = engine.handlers
    request = fake_sglang.ReleaseMemoryOccupationReqInput(tags=["weights"])
    (answer,) = answers_of([updater.release_memory_occupation(recv_req=request)])
    assert (answer.failure, answer.tags) == (None, ("weights",))
    state = engine.get_internal_state(recv_req=None).internal_state["memsaver"]
    assert list(state["released"]) == ["weights"]
    request = fake_sglang.ResumeMemoryOccupationReqInput(tags=["weights"])
    (answer,) = answers_of([updater.resume_memory_occupation(recv_req=request)])
    assert answer.released == () and engine.model.is_intact()
    with pytest.raises(TypeError):  # as in SGLang's own handler
        updater.resume_memory_occupation(other=request)


@pytest.mark.parametrize("tags", [None, [], ["weights"], ["weights", "kv_cache"]])
def test_doing_it_twice_changes_nothing(engine, tags):
    ask(engine, "release", tags)
    after = states()
    answer = ask(engine, "release", tags)
    assert answer.tags == () and answer.failure is None and states() == after
    ask(engine, "resume")
    answer = ask(engine, "resume", tags)
    assert answer.tags == () and answer.failure is None
    assert engine.model.is_intact() and set(states().values()) == {"mapped"}


def test_unknown_tags_change_nothing(engine):
    for operation in ("release", "resume"):
        for tags in (["weights", "optimizer"], "weights", 5, [["weights"]], ["\ud800"], [None]):
            answer = ask(engine, operation, tags)
            assert isinstance(error_of([answer]), memsaver.ConfigError)
    assert set(states().values()) == {"mapped"} and engine.handlers.offload_tags == set()


def test_a_busy_engine_refuses(engine):
    engine.begin("a")
    answer = ask(engine, "release")
    assert isinstance(error_of([answer]), EngineBusyError)
    assert set(states().values()) == {"mapped"} and answer.released == ()
    engine.end("a")
    assert ask(engine, "release").failure is None


def test_the_kv_cache_is_released_while_other_contents_are_saved_again(engine, sim, wait_until):
    with memsaver.region(PartName("weights\x1fhost"), backup="host"):
        simulator.buffer(MIB)  # freed at once: a part without memory
    with sim.fault("cuMemcpyDtoHAsync"):  # a first save keeps the cache if it fails
        assert ask(engine, "release").lost == () and engine.kv.is_intact()
    ask(engine, "release")
    ask(engine, "resume")
    engine.model.fill(8)
    answers = []
    release = threading.Thread(target=lambda: answers.append(ask(engine, "release")))
    with held(sim):
        release.start()
        wait_until(lambda: states()["kv_cache"] == "paused")
        assert states()["weights"] == states()["cuda_graph"] == "saving"
        assert sim.tag_bytes() == 6 * MIB
    release.join()
    assert answers[0].failure is None and set(states().values()) == {"paused"}
    ask(engine, "resume")
    # If the rest cannot be saved, the cache has its memory again.
    with sim.fault("cuMemcpyDtoHAsync"):
        engine.model.fill(9)
        answer = ask(engine, "release")
    assert isinstance(error_of([answer]), memsaver.DriverError) and answer.lost == ("kv_cache",)
    assert set(states().values()) == {"mapped"} and engine.kv.is_zero()
    assert engine.model.is_intact() and engine.graph.is_intact()


@pytest.mark.parametrize("cause", ["a weight cache is active", "no host memory"])
def test_a_release_whose_preparation_fails_changes_nothing(engine, monkeypatch, cause):
    """Either SGLang's own preparation fails, or memsaver cannot save the model's buffers."""

    def no_memory(tensor, source):
        raise MemoryError(cause)

    with monkeypatch.context() as patch:
        if cause == "no host memory":
            patch.setattr(fake_sglang.Tensor, "copy_", no_memory)
        else:
            patch.setattr(engine.handlers, "prepare_error", RuntimeError(cause))
        answer = ask(engine, "release")
    assert cause in str(error_of([answer])) and answer.released == ()
    assert set(states().values()) == {"mapped"} and engine.handlers.offload_tags == set()
    assert engine.model.is_intact() and engine.graph.is_intact() and engine.kv.is_intact()
    assert ask(engine, "release").failure is None
    assert ask(engine, "resume").failure is None and engine.model.is_intact()


@pytest.mark.parametrize("where", ["before weights", "after weights", "after kv_cache"])
def test_a_failure_of_sglangs_own_part_of_a_resume_is_undone(engine, sim, where):
    ask(engine, "release")
    updater = engine.handlers
    updater.resume_errors[where] = RuntimeError("a buffer has another shape")
    for _ in range(2):
        answer = ask(engine, "resume")
        assert "a buffer has another shape" in str(error_of([answer]))
        assert "released as before" in str(error_of([answer])) and answer.held == ()
        assert set(states().values()) == {"paused"} and sim.tag_bytes() == 0
        assert set(answer.released) == updater.offload_tags == set(fake_sglang.TAGS)
    updater.resume_errors.clear()
    assert ask(engine, "resume").failure is None
    assert engine.model.is_intact() and engine.graph.is_intact() and engine.kv.is_zero()
    assert ask(engine, "release").failure is None and ask(engine, "resume").failure is None


def test_weights_that_were_not_restored_for_an_update_do_not_become_a_backup(engine):
    ask(engine, "release")
    updater = engine.handlers
    updater.resume_errors["after weights"] = RuntimeError("a buffer has another shape")
    answer = ask(engine, "resume", ["weights"], rid=REWRITTEN)
    assert answer.lost == ("weights",) and "load weights" in str(error_of([answer]))
    assert states()["weights"] == "paused"
    updater.resume_errors.clear()
    answer = ask(engine, "resume")
    assert answer.failure is None and answer.ranks[0].copied_bytes.get("weights", 0) == 0


def test_memory_that_a_failed_resume_leaves_mapped_is_released(engine, sim):
    ask(engine, "release")
    updater = engine.handlers
    updater.resume_errors["after kv_cache"] = RuntimeError("no queue")
    with sim.fault("cuMemUnmap", times=0):
        answer = ask(engine, "resume")
    message = str(error_of([answer]))
    assert "no queue" in message and "could not release it: rank 0" in message
    assert "as before" not in message
    assert set(answer.held) == set(answer.released) == set(fake_sglang.TAGS)
    assert sim.tag_bytes() > 0

    engine.running.add("a")  # its memory is mapped, so requests may use it
    assert isinstance(error_of([ask(engine, "release")]), EngineBusyError)
    assert sim.tag_bytes() > 0
    engine.running.clear()
    with sim.fault("cuMemUnmap", times=0):
        answer = ask(engine, "release")
    assert "some ranks still have their memory" in str(error_of([answer])) and len(answer.held) == 3
    assert set(answer.released) == set(fake_sglang.TAGS)
    answer = ask(engine, "release", ["kv_cache"])
    assert answer.failure is None and answer.tags == ("kv_cache",)
    assert set(answer.held) == {"weights", "cuda_graph"}
    answer = ask(engine, "release")
    assert answer.held == () and answer.ranks[0].bytes == 6 * MIB and sim.tag_bytes() == 0
    updater.resume_errors.clear()
    assert ask(engine, "resume").failure is None
    assert engine.model.is_intact() and engine.graph.is_intact()


def test_a_release_that_is_refused_keeps_contents_without_a_backup(engine):
    def refuse(tag):
        raise RuntimeError("not now")

    handle = memsaver.on_pause(refuse, "cuda_graph")
    try:
        answer = ask(engine, "release")
    finally:
        handle.remove()
    message = str(error_of([answer]))
    assert "not now" in message and "with its contents" in message and "lost" not in message
    assert engine.kv.is_intact() and engine.model.is_intact() and engine.graph.is_intact()
    assert ask(engine, "release").failure is None and ask(engine, "resume").failure is None


@pytest.mark.parametrize("version", ["0.5.23"])
def test_an_sglang_without_the_functions_that_the_hooks_need(sglang, monkeypatch, caplog):
    """SGLang's own handlers run, and the internal state reports no guard."""
    monkeypatch.setattr(moves, "names_of", lambda tag: ())
    request = fake_sglang.ReleaseMemoryOccupationReqInput()
    for owner, name in [
        ("updater", "offload_tags"),
        ("updater", "tp_cpu_group"),
        ("updater", "is_fully_idle"),
        ("scheduler", "weight_updater"),
    ]:
        scheduler = sglang.Scheduler(sglang.Updater)
        updater = scheduler.weight_updater
        delattr(updater if owner == "updater" else scheduler, name)
        caplog.clear()
        for _ in range(2):
            state = scheduler.handle("get_internal_state")
            assert state is not None and "memsaver" not in state.internal_state
        assert scheduler.death is None and caplog.text.count(name) == 1
        if owner == "updater":
            output = hooks.scheduler.release(lambda *given: given, updater, request)
            assert output == (updater, request)


@pytest.mark.parametrize("version", ["0.5.13"])
def test_an_updater_without_a_scheduler_or_its_methods_gets_no_hooks(sglang):
    updater = sglang.Scheduler(sglang.Updater).handlers
    assert handlers.is_as_expected(updater)
    updater.is_fully_idle = lambda: True
    assert not handlers.is_as_expected(updater)


def test_answers_without_room_for_a_text_are_not_guarded(sglang, monkeypatch):
    import sglang.srt.managers.io_struct as messages

    monkeypatch.setattr(messages, "ResumeMemoryOccupationReqOutput", type("Output", (), {}))
    scheduler = sglang.Scheduler(sglang.Updater)
    assert "memsaver" not in scheduler.handle("get_internal_state").internal_state
    request = fake_sglang.ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
    output = scheduler.handle("release_memory_occupation", request)
    assert output is not None and answers_of([output]) == [] and scheduler.death is None


def test_model_buffers_are_restored_without_a_backup(sglang, sim, tag, make_blocks):
    tag.names.extend(fake_sglang.TAGS)
    scheduler = sglang.Scheduler(sglang.Updater)
    scheduler.model = make_blocks("weights", [MIB], backup="none")[0]
    saved = scheduler.buffers()
    ask(scheduler, "release")
    ask(scheduler, "resume")
    assert scheduler.buffers() == saved and any(saved)
    assert scheduler.model.bytes()[16:].count(0) == MIB - 16
    del scheduler.model


@pytest.mark.parametrize("can_pin", [True, False])
def test_a_release_leaves_no_model_buffers_on_the_device(engine, monkeypatch, can_pin):
    monkeypatch.setattr(fake_sglang.Tensor, "can_pin", can_pin)
    (before,) = [tensor for _, tensor in engine.buffers()["buffers"]]
    ask(engine, "release", ["kv_cache", "weights"])
    stash = engine.handlers.stashed_model_static_state
    on_host = fake_sglang.Tensor(before.data, is_cuda=False, is_pinned=can_pin)
    assert [tensor for _, tensor in stash["buffers"]] == [on_host] and before.is_cuda
    ask(engine, "resume")
    assert not hasattr(engine.handlers, "stashed_model_static_state")
    assert engine.model.is_intact()


def test_the_state_is_part_of_the_server_information(engine):
    def state():
        fields = engine.handle("get_internal_state").internal_state["memsaver"]
        return SchedulerState.from_fields(fields)

    first = state()
    known = {"update_ranks": 1, "domain": domain()}
    assert first == SchedulerState(first.scheduler, (), True, None, **known)
    answer = ask(engine, "release", ["kv_cache"])
    asleep = SchedulerState(first.scheduler, ("kv_cache",), True, answer, **known)
    assert state() == asleep
    assert answer.number == 1 and answer.scheduler == first.scheduler
    engine.running.add("a")
    assert not state().idle
    engine.running.clear()
    assert ask(engine, "resume").number == 2


def test_the_state_contains_the_tags_whose_contents_were_discarded(engine):
    """The state informs every process that admits requests. An open update session ends."""
    updater = engine.handlers

    def released(rid=None, kept=True):
        engine.server_args = SimpleNamespace(enable_weights_cpu_backup=kept)
        updater._session = "open"
        assert ask(engine, "release", rid=rid).failure is None
        fields = engine.handle("get_internal_state").internal_state["memsaver"]
        found = SchedulerState.from_fields(fields).lost, updater._session
        assert ask(engine, "resume").failure is None
        return found

    assert released() == ((), "open")
    assert released(rid=REWRITTEN) == (("weights",), None)
    assert released() == ((), "open")
    assert released(kept=False) == (("weights",), None)


@pytest.mark.parametrize("rid", [None, REWRITTEN])
def test_weights_lack_contents_until_an_update_of_all_weights_or_a_resume_of_all_tags(engine, rid):
    engine.server_args = SimpleNamespace(enable_weights_cpu_backup=rid is not None)
    updater = engine.handlers

    def lost():
        fields = engine.handle("get_internal_state").internal_state["memsaver"]
        return SchedulerState.from_fields(fields).lost == ("weights",)

    def mapped():
        """Release all tags, and map the weights without their contents."""
        assert ask(engine, "release").failure is None
        assert ask(engine, "resume", ["weights"], rid=rid).failure is None
        assert lost()

    mapped()
    assert ask(engine, "resume", ["kv_cache"]).failure is None and not lost()
    mapped()
    lost_weights.loaded(updater, SimpleNamespace(flush_cache=False))
    assert lost()
    lost_weights.loaded(updater, SimpleNamespace(flush_cache=True))
    assert not lost()
    assert ask(engine, "resume").failure is None
    mapped()
    lost_weights.loaded(updater, type("UpdateWeightFromDiskReqInput", (), {})())
    assert not lost()


def test_discarded_weights_that_a_failed_release_leaves_released_are_lost(engine, monkeypatch):
    """The release fails on this rank, and another rank cannot undo its own release."""
    failed = [RankReport(1, "host", 1, failure=Failure("DriverError", "no memory"))]
    pause = moves.pause
    with monkeypatch.context() as broken:
        broken.setattr(moves, "pause", lambda *args: [*pause(*args), *failed])
        broken.setattr(moves, "resume", lambda *_: failed)
        answer = ask(engine, "release", rid=REWRITTEN)
    assert answer.failure is not None and "weights" in answer.released
    fields = engine.handle("get_internal_state").internal_state["memsaver"]
    assert SchedulerState.from_fields(fields).lost == ("weights",)


def test_another_saver_is_guarded_and_does_its_own_work(sglang, monkeypatch):
    monkeypatch.setattr(moves, "names_of", lambda tag: ())  # other tests created these tags
    scheduler = sglang.Scheduler(sglang.Updater)
    saver = scheduler.handlers.memory_saver_adapter
    for _ in range(2):
        ask(scheduler, "release", ["kv_cache", "weights"])
        ask(scheduler, "release")
        assert saver.paused == set(fake_sglang.TAGS)
    for _ in range(2):
        ask(scheduler, "resume", ["weights"])
        ask(scheduler, "resume")
        assert saver.paused == set()


def test_without_hooks_the_fake_dies(monkeypatch):
    release = "release_memory_occupation", fake_sglang.ReleaseMemoryOccupationReqInput()
    resume = "resume_memory_occupation", fake_sglang.ResumeMemoryOccupationReqInput()
    release_cache = release[0], fake_sglang.ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
    with fake_sglang.modules(monkeypatch) as classes:
        for messages in ([resume], [release_cache, resume], [release, release]):
            scheduler = classes.Scheduler(classes.Updater)
            for message in messages:
                assert scheduler.death is None
                scheduler.handle(*message)
            assert scheduler.death is not None
        busy = classes.Scheduler(classes.Updater)
        busy.begin("a")
        busy.handle(*release)
        assert isinstance(busy.death, AssertionError)
