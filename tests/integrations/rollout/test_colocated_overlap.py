"""Tests a colocated session whose optimizer states move while other stages run."""

import weakref

import pytest
from colocated_engine import stages_of
from colocated_scene import Scene, X, paused
from trainers import Trainer, bytes_of

import memsaver
from memsaver.integrations.rollout import Phase, Stage

torch = pytest.importorskip("torch")

OVERLAPPED = [
    Stage.SETTLE,
    Stage.RESUME_MODEL,
    Stage.WAKE_WEIGHTS,
    Stage.UPDATE,
    Stage.PAUSE_OPTIMIZER,
    Stage.PAUSE_MODEL,
    Stage.WAKE_REST,
]


@pytest.fixture
def known(sim, tag):
    """Yield a session after a first step, which has measured the memory that an update needs."""
    scene = Scene(tag, overlap=True)
    for _ in range(2):  # the first update finds the engine awake
        with scene.session.rollout():
            pass
        with scene.session.training():
            scene.train()
    yield scene
    scene.engine.fail.clear()
    scene.__dict__.clear()


def test_each_stage_waits_for_what_it_needs_and_for_nothing_else(known, sim):
    session, engine, optimizer = known.session, known.engine, known.tags[1]
    update, seen = engine.update_weights, []

    def updating(*args, **named):
        seen.append(memsaver.state(optimizer))
        sim.hold_streams(False)
        return update(*args, **named)

    engine.update_weights = updating
    sim.hold_streams(True)  # the pause cannot copy before the update runs
    with memsaver.timeline() as recorded, session.rollout():
        assert seen == ["saving"]
        assert stages_of(session) == OVERLAPPED
        assert paused(known) == {"model", "optimizer"}
    rows = {(row.kind, row.tag): row for row in recorded.transitions}
    leaving, arriving = rows["pause", optimizer], rows["resume", engine.names["weights"]]
    assert leaving.begin_seconds < arriving.begin_seconds
    assert arriving.end_seconds < leaving.end_seconds < rows["pause", known.tags[0]].begin_seconds
    by_stage = {report.stage: report for report in session.stages}
    assert by_stage[Stage.PAUSE_OPTIMIZER].result.changed == (optimizer,)
    begin = {stage: report.began - recorded.trace.clock for stage, report in by_stage.items()}
    moments = [
        begin[Stage.RESUME_MODEL],
        leaving.begin_seconds,
        begin[Stage.WAKE_WEIGHTS],
        arriving.begin_seconds,
        arriving.end_seconds,
        begin[Stage.UPDATE],
        leaving.end_seconds,
        rows["pause", known.tags[0]].begin_seconds,
    ]
    assert moments == sorted(moments)
    order = [begin[stage] for stage in OVERLAPPED]
    assert order[0] > 0 and order == sorted(order)
    with session.training():
        assert memsaver.state(known.tags[0]) == "mapped"
        known.train()
    assert stages_of(session)[-2:] == [Stage.RESUME_TRAINER, Stage.TRAIN]
    assert session.stages[-1].result.changed == (optimizer,)


def test_gradients_are_computed_before_the_states_are_back(known, sim):
    with known.session.rollout():
        pass
    resume = memsaver.resume

    def held_resume(*tags, wait=True):
        sim.hold_streams(not wait)  # from the begin of the optimizer's resume on
        return resume(*tags, wait=wait)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memsaver, "resume", held_resume)
        with known.session.training():
            assert memsaver.state(known.tags[1]) == "restoring"
            known.trainer.backward()
            assert memsaver.state(known.tags[1]) == "restoring"
            known.trainer.optimizer.zero_grad()
            sim.hold_streams(False)
            known.train()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum"])
def test_a_session_computes_the_same_with_and_without_sleep_and_overlap(sim, tag, optimizer):
    plain = Scene(tag, sleep=False, optimizer=optimizer)
    results = []
    for scene, overlap in (
        (plain, False),
        (Scene(tag, optimizer=optimizer), False),
        (Scene(tag, by_layer=True, optimizer=optimizer), False),
        (Scene(tag, overlap=True, optimizer=optimizer), True),
        (Scene(tag, overlap=True, by_layer=True, optimizer=optimizer), True),
    ):
        outputs = []
        for step in range(6):
            with scene.session.rollout() as engine:
                outputs.append((bytes_of(engine.generate(X)), tuple(engine.weights)))
                assert (stages_of(scene.session) == OVERLAPPED) == (overlap and step > 1)
            with scene.session.training():
                scene.train()
        with scene.session.training():
            results.append((outputs, scene.trainer.contents()))
    assert all(result == results[0] for result in results)
    assert len({weights for _, weights in results[0][0]}) == 6
    assert not paused(plain) and set(plain.engine.heard) == {"update_weights"}
    assert stages_of(plain.session)[:2] == [Stage.SETTLE, Stage.UPDATE]


def test_a_model_by_layer_returns_in_the_block_before_the_states(sim, tag):
    scene = Scene(tag, overlap=True, by_layer=True)
    with scene.session.rollout():
        pass
    sim.hold_streams(True)
    with scene.session.training():
        assert set(scene.tags) == {name for name in scene.tags if memsaver.state(name) != "mapped"}
        sim.hold_streams(False)
        scene.train()
    resumed = scene.session.stages[-1]
    assert resumed.stage is Stage.TRAIN and resumed.result.changed == scene.tags
    with scene.session.rollout():
        pass
    # Without memory for the model, the stage before the block fails.
    with (
        sim.fault("cuMemCreate", sim.OUT_OF_MEMORY),
        pytest.raises(memsaver.OutOfDeviceMemoryError),
    ):
        with scene.session.training():
            raise AssertionError("the block was entered")
    assert paused(scene) >= {"model", "optimizer"}
    with scene.session.training():
        scene.train()
    assert not paused(scene) & {"model", "optimizer"}


def test_without_room_each_move_ends_before_the_next_stage(known, sim):
    free, _ = memsaver.device_memory(0)
    sim.occupy(free - (1 << 29))  # less than the spare GiB is left
    with known.session.rollout():
        assert stages_of(known.session)[1] is Stage.PAUSE_OPTIMIZER
    with known.session.training():
        assert not paused(known) & {"model", "optimizer"}
    assert known.session.stages[-1].result is None
    sim.occupy(0)
    with known.session.rollout():
        assert stages_of(known.session) == OVERLAPPED


def test_gradients_that_were_paused_return_before_the_block(known):
    with known.session.training():
        known.trainer.backward()
    with known.session.rollout():
        pass
    with known.session.training():
        assert not paused(known) & {"model", "optimizer"}
        assert memsaver.state(known.tags[1]) == "mapped"
        known.trainer.backward()
    assert known.session.stages[-1].result is None


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [memsaver.OutOfDeviceMemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("call", ["wake_up weights", "update_weights", "state"])
def test_an_update_without_room_is_repeated_after_the_pause(known, call, short):
    known.engine.fail[call] = short("CUDA out of memory. Tried to allocate 2.00 GiB.")
    state, copies = known.session._state, []

    def weights():
        assert [one() for one in copies] == [None] * len(copies)  # the first attempt's
        mine = {name: tensor.clone() for name, tensor in state().items()}
        copies.extend(map(weakref.ref, mine.values()))
        if call == "state" and call in known.engine.fail:
            raise known.engine.fail.pop(call)
        return mine

    known.session._state = weights
    with known.session.rollout() as engine:
        expected = sum(float(t.double().sum()) for t in engine._state.values())
        assert float(engine.generate(X)[0]) == pytest.approx(1 + expected, rel=1e-4)
        stages = stages_of(known.session)
        assert stages[-4:] == [Stage.WAKE_WEIGHTS, Stage.UPDATE, Stage.PAUSE_MODEL, Stage.WAKE_REST]
        assert stages.index(Stage.PAUSE_OPTIMIZER) == len(stages) - 5
        assert paused(known) == {"model", "optimizer"}
    with known.session.training():
        known.train()


def test_after_a_failed_update_the_next_one_does_not_overlap(known):
    known.engine.fail["update_weights"] = ZeroDivisionError("a fault of the loader")
    with pytest.raises(ZeroDivisionError), known.session.rollout():
        pass
    with known.session.training():
        known.train()
    for overlaps in (False, True):
        with known.session.rollout():
            assert (stages_of(known.session) == OVERLAPPED) == overlaps
        with known.session.training():
            known.train()


@pytest.mark.parametrize("call", ["cuMemcpyDtoHAsync", "cuMemUnmap"])
def test_a_pause_that_fails_beside_the_update_leaves_the_states_mapped(known, sim, call):
    with known.session.training():
        before = known.trainer.contents()
        known.trainer.step()  # the states differ from their backup
        known.trainer.optimizer.zero_grad()
        changed = known.trainer.contents()
    with sim.fault(call, 1):
        with pytest.raises(memsaver.DriverError, match=call):
            with known.session.rollout():
                pass
    assert known.session.stages[-1].stage is Stage.PAUSE_OPTIMIZER
    assert not paused(known) & {"model", "optimizer"}
    with known.session.training():
        assert known.trainer.contents() == changed != before
    with known.session.rollout():
        assert stages_of(known.session) == OVERLAPPED


def test_states_that_cannot_return_are_an_error_of_the_step(known, sim):
    session, expected = known.session, Trainer()
    with session.rollout():
        pass
    with pytest.MonkeyPatch.context() as patch:
        begin = session._trainer.begin_resume

        def failing(tag):
            sim.fail("cuMemCreate", sim.OUT_OF_MEMORY)
            return begin(tag)

        patch.setattr(session._trainer, "begin_resume", failing)
        for uses in (lambda: known.train(), lambda: None):  # the step, or the end of the block
            with pytest.raises(memsaver.OutOfDeviceMemoryError):
                with session.training():
                    uses()
            assert "optimizer" in paused(known) and session.phase is Phase.IDLE
            assert session.stages[-1].error.startswith("OutOfDeviceMemoryError")
    known.trainer.optimizer.zero_grad()
    for _ in range(3):
        expected.step()
        expected.optimizer.zero_grad()
    sim.stream_delay(0.05)
    with session.training():
        known.trainer.done = 3
    assert known.trainer.contents() == expected.contents()  # the end of the block waits for them
    sim.stream_delay(0)
    with session.rollout() as engine:
        engine.generate(X)


def test_an_exception_in_the_block_waits_for_the_states(known, sim):
    with known.session.rollout():
        pass
    sim.stream_delay(0.1)
    with pytest.raises(KeyboardInterrupt):
        with known.session.training():
            raise KeyboardInterrupt
    sim.stream_delay(0)
    assert memsaver.state(known.tags[1]) == "mapped"
    with known.session.rollout() as engine:
        engine.generate(X)
