"""Tests the order of the steps of a trainer and an engine on one device."""

import time

import pytest
from colocated_engine import KV_BYTES, TagEngine, stages_of
from colocated_scene import ENTERING, Scene, X, paused
from trainers import Trainer, bytes_of, lies_in

import memsaver
from memsaver.errors import InvalidStateError
from memsaver.integrations.rollout import ColocatedSession, Phase, Stage

GIB = 1 << 30


def test_stages_are_in_order_and_each_side_has_the_memory_of_the_other(scene, sim):
    session, engine = scene.session, scene.engine
    for step in range(3):
        with session.rollout() as given:
            assert given is engine and session.phase is Phase.ROLLOUT
            assert paused(scene) == {"model", "optimizer"}
            assert session.engine_is_current
            assert stages_of(session) == ENTERING  # the previous step's are removed
            generated = engine.generate(X)
        assert paused(scene) == {"model", "optimizer", "weights", "kv_cache"}
        assert sim.tag_bytes() == 0
        assert stages_of(session) == [*ENTERING, Stage.GENERATE, Stage.SLEEP]
        with session.training():
            assert session.phase is Phase.TRAINING
            assert paused(scene) == {"weights", "kv_cache"}
            expected = [bytes_of(t) for t in scene.trainer.model.state_dict().values()]
            weights = sum(
                float(t.double().sum()) for t in scene.trainer.model.state_dict().values()
            )
            assert generated[0] == pytest.approx(1 + weights, rel=1e-4)
            scene.train()
            changed = [bytes_of(t) for t in scene.trainer.model.state_dict().values()]
            assert changed != expected, step
        assert session.phase is Phase.IDLE
        assert stages_of(session)[-3:] == [Stage.SLEEP, Stage.RESUME_TRAINER, Stage.TRAIN]
        assert not any(report.error for report in session.stages)


def test_the_weights_are_sent_again_to_an_engine_that_lost_them(scene):
    session, engine = scene.session, scene.engine
    with session.training():
        with pytest.raises(InvalidStateError, match="in a rollout, not in training"):
            session.send_weights()
    with session.rollout():
        first = bytes_of(engine.generate(X))
        for tensor in engine._state.values():
            tensor.zero_()
        session.send_weights()
        assert session.phase is Phase.ROLLOUT and paused(scene) == {"model", "optimizer"}
        assert bytes_of(engine.generate(X)) == first
    assert stages_of(session)[len(ENTERING) :] == [
        Stage.SLEEP,
        *ENTERING,
        Stage.GENERATE,
        Stage.SLEEP,
    ]
    # Between blocks, the next rollout sends them.
    updates = engine.heard.count("update_weights")
    session.send_weights()
    assert paused(scene) == {"model", "optimizer", "weights", "kv_cache"}
    assert engine.heard.count("update_weights") == updates
    with session.rollout():
        assert engine.heard.count("update_weights") == updates + 1
        assert bytes_of(engine.generate(X)) == first
    with session.training():
        scene.train()
    session.close()
    with pytest.raises(InvalidStateError, match="closed"):
        session.send_weights()


def test_without_a_session_of_sleep_the_trainer_is_left_where_it_is(sim, tag):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    session = ColocatedSession(engine, trainer.model, trainer.optimizer, sleep=False)
    with session.rollout():
        pass
    assert session.trainer_tags == ()
    assert memsaver.explain(next(trainer.model.parameters())).tag is None
    for _ in range(2):
        session.close()
    updates = engine.heard.count("update_weights")
    for block in (session.rollout, session.training):
        with pytest.raises(InvalidStateError, match="the session is closed"), block():
            raise AssertionError("closed")
    with pytest.raises(InvalidStateError, match="the session is closed"):
        session.send_weights()
    assert engine.heard.count("update_weights") == updates


def test_a_session_offloads_the_given_targets_to_its_default_tags(sim, tag):
    tag.names += ["model", "optimizer"]
    trainer, name = Trainer(), tag("reference")
    trainer.step()
    with memsaver.region(name, backup="host"):
        reference = memsaver.simulator.empty(1 << 20).fill_(3)
    session = ColocatedSession(
        TagEngine(trainer.model, tag("weights"), tag("kv")),
        trainer.model,
        trainer.optimizer,
        tags=[name],
        update_options={"scale": 2},
    )
    assert session.trainer_tags == ("model", "optimizer", name)
    assert all(lies_in(p, "model") for p in trainer.model.parameters())
    with session.rollout():
        assert all(memsaver.state(t) == "paused" for t in session.trainer_tags)
    with session.training():
        assert reference.sum() == 3 * (1 << 20)
        trainer.step()
        with pytest.raises(InvalidStateError, match="training"):
            session.close()
    session.close()
    memsaver.pause("optimizer")
    trainer.optimizer.zero_grad()  # no hook is left: nothing speaks


def test_weights_that_the_engine_has_are_not_sent_again(sim, tag):
    scene = Scene(tag, engine_keeps_weights=True)
    with memsaver.region(scene.engine.names["weights"], backup="host"):
        pass
    session = scene.session
    for _ in range(2):
        with session.rollout() as engine:
            generated = engine.generate(X)
    assert scene.engine.heard.count("update_weights") == 1
    assert Stage.UPDATE not in stages_of(session)
    assert float(generated[0]) != 1
    session.weights_changed()
    with session.rollout():
        pass
    assert scene.engine.heard.count("update_weights") == 2


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_weights_that_an_update_rewrites_are_neither_saved_nor_restored(sim, tag, keeps, whole):
    class Keeping(TagEngine):
        def sleep(self, tags=None, *, keep_weights=True, **options):
            backup = None if keep_weights else "none"
            memsaver.pause(self.names["weights"], backup=backup)
            return super().sleep(tags, **options)

        def wake_up(self, tags=None, *, keep_weights=True, **options):
            if not keep_weights:
                memsaver.resume(self.names["weights"], restore=False)
            return super().wake_up(tags, **options)

    scene = Scene(tag, engine_keeps_weights=keeps, whole_updates=whole, engine=Keeping)
    weights, session = scene.engine.names["weights"], scene.session
    with memsaver.region(weights, backup="host"):
        pass
    for _ in range(3):
        with session.rollout() as engine:
            first = bytes_of(engine.generate(X))
        with session.rollout() as engine:  # such as an evaluation
            assert bytes_of(engine.generate(X)) == first
        with session.training():
            scene.train()
    (row,) = memsaver.stats()[weights]
    # The engine is awake at first. Kept weights are restored for the three evaluations only.
    times = {(False, False): 5, (True, False): 5, (False, True): 0, (True, True): 3}
    assert row.restored_bytes == times[keeps, whole] * row.last_restored_bytes
    assert bool(row.saved_bytes) == bool(row.restored_bytes) == bool(times[keeps, whole])
    assert scene.engine.heard.count("update_weights") == (3 if keeps else 6)


def test_gradients_survive_a_rollout(scene):
    trainer = scene.trainer
    with scene.session.training():
        trainer.backward()
        gradients = [bytes_of(p.grad) for p in trainer.model.parameters()]
    with scene.session.rollout():
        assert paused(scene) == {"model", "optimizer"}
    with scene.session.training():
        assert [bytes_of(p.grad) for p in trainer.model.parameters()] == gradients
        assert any(any(g) for g in gradients)


def test_peaks_are_the_drivers(scene, sim, wait_until):
    heard = []
    session = ColocatedSession(
        scene.engine, None, None, state=dict, sleep=False, on_stage=heard.append
    )
    _, total = memsaver.device_memory(0)
    idle = total - memsaver.device_memory(0)[0]
    with session.rollout():
        sim.occupy(3 * GIB)
        looks = sim.calls("cuMemGetInfo")
        time.sleep(0.1)
        wait_until(lambda: sim.calls("cuMemGetInfo") > looks + 1)
        sim.occupy(0)
    by_stage = {report.stage: report for report in heard}
    assert heard == session.stages
    generate, settle = by_stage[Stage.GENERATE], by_stage[Stage.SETTLE]
    assert idle + 3 * GIB <= generate.peak_bytes < idle + 3 * GIB + (64 << 20)
    assert settle.peak_bytes == idle
    assert generate.ranks[0].total_bytes == total
    assert generate.slowest.seconds >= 0.1 and generate.seconds >= generate.slowest.seconds


def test_a_stage_reports_its_result(scene):
    with scene.session.training():
        pass
    with scene.session.rollout():
        pass
    by_stage = {report.stage: report for report in scene.session.stages}
    assert by_stage[Stage.UPDATE].result == len(scene.trainer.model.state_dict())
    assert by_stage[Stage.PAUSE_MODEL].result.changed == (scene.tags[0],)
    assert by_stage[Stage.WAKE_REST].result.bytes >= KV_BYTES
    held = by_stage[Stage.GENERATE].ranks[0].tag_bytes
    assert held - by_stage[Stage.SLEEP].ranks[0].tag_bytes >= KV_BYTES
    # The trainer's copy is paused before the KV cache is resumed.
    before, after = by_stage[Stage.UPDATE].ranks[0], by_stage[Stage.PAUSE_MODEL].ranks[0]
    assert after.tag_bytes < before.tag_bytes
