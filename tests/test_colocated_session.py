"""A trainer and an engine on one device: the order of their steps, and what holds after errors."""

import time
import types

import pytest

import memsaver
from memsaver.integrations.rollout import ColocatedSession, Phase, Stage
from memsaver.integrations.trainer import offload

torch = pytest.importorskip("torch")

from colocated_engine import KV_BYTES, TagEngine, stages_of  # noqa: E402
from driver_faults import DRIVER_CALLS  # noqa: E402
from trainers import Trainer, bytes_of, lies_in, states_of  # noqa: E402

MAPPED, PAUSED = memsaver.State.MAPPED, memsaver.State.PAUSED
GIB = 1 << 30

ENTERING = [
    Stage.SETTLE,
    Stage.PAUSE_OPTIMIZER,
    Stage.RESUME_MODEL,
    Stage.WAKE_WEIGHTS,
    Stage.UPDATE,
    Stage.PAUSE_MODEL,
    Stage.WAKE_REST,
]
X = torch.ones(4)


class Scene:
    """A trainer, an engine with tags of this test's own, and the session of both."""

    def __init__(self, tag, **options) -> None:
        self.trainer = Trainer()
        self.trainer.step()
        self.trainer.optimizer.zero_grad()
        self.engine = TagEngine(self.trainer.model, tag("weights"), tag("kv"))
        self.tags = tag("model"), tag("optimizer")
        handles = (
            offload(self.trainer.model, tag=self.tags[0]),
            offload(self.trainer.optimizer, tag=self.tags[1]),
        )
        options.setdefault("state", self.trainer.model.state_dict)
        self.session = ColocatedSession(self.engine, *handles, **options)

    def train(self) -> None:
        self.trainer.step()
        self.trainer.optimizer.zero_grad()

    def states(self) -> dict[str, str]:
        names = {"model": self.tags[0], "optimizer": self.tags[1], **self.engine.names}
        return {name: str(memsaver.state(tag)) for name, tag in names.items()}


@pytest.fixture
def scene(sim, tag):
    made = Scene(tag)
    yield made
    made.__dict__.clear()  # pytest keeps it


def paused(scene) -> set[str]:
    return {name for name, state in scene.states().items() if state == "paused"}


def test_each_has_the_memory_that_the_other_gave(scene, sim):
    session, engine = scene.session, scene.engine
    for step in range(3):
        with session.rollout() as given:
            assert given is engine and session.phase is Phase.ROLLOUT
            assert paused(scene) == {"model", "optimizer"}
            assert session.engine_is_current
            generated = engine.generate(X)
        assert paused(scene) == {"model", "optimizer", "weights", "kv_cache"}
        assert sim.tag_bytes() == 0
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


def test_stages_come_in_their_order(scene):
    session = scene.session
    with session.rollout():
        assert stages_of(session) == ENTERING
    assert stages_of(session) == [*ENTERING, Stage.GENERATE, Stage.SLEEP]
    with session.training():
        pass
    assert stages_of(session)[-3:] == [Stage.SLEEP, Stage.RESUME_TRAINER, Stage.TRAIN]
    assert not any(report.error for report in session.stages)
    with session.rollout():
        assert stages_of(session) == ENTERING  # those of the step before are gone


def test_a_session_that_sleeps_computes_what_one_does_that_never_does(sim, tag):
    sleeping, plain = Scene(tag), Scene(tag, sleep=False)
    results = []
    for scene in (sleeping, plain):
        outputs = []
        for _ in range(5):
            with scene.session.rollout() as engine:
                outputs.append((bytes_of(engine.generate(X)), tuple(engine.weights)))
            with scene.session.training():
                scene.train()
        with scene.session.training():
            results.append((outputs, scene.trainer.contents()))
    assert results[0] == results[1]
    assert len({weights for _, weights in results[0][0]}) == 5
    assert not paused(plain)
    assert [call for call in plain.engine.heard if call != "update_weights"] == []
    assert stages_of(plain.session)[:2] == [Stage.SETTLE, Stage.UPDATE]


def test_without_a_session_of_sleep_the_trainer_is_left_where_it_is(sim, tag):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    session = ColocatedSession(engine, trainer.model, trainer.optimizer, sleep=False)
    with session.rollout():
        pass
    assert session.trainer_tags == ()
    assert memsaver.explain(next(trainer.model.parameters())).tag is None


def test_it_offloads_what_it_is_given(sim, tag, run_python):
    # With the default tags, which are the process's: in one of its own.
    run_python(
        """
        import memsaver
        from memsaver.integrations.rollout import ColocatedSession
        from colocated_engine import TagEngine
        from trainers import Trainer, lies_in

        trainer = Trainer()
        trainer.step()
        engine = TagEngine(trainer.model, "weights", "kv")
        with memsaver.region("reference", backup="host"):
            reference = memsaver.simulator.empty(1 << 20)
        reference.fill_(3)
        session = ColocatedSession(
            engine,
            trainer.model,
            trainer.optimizer,
            tags=["reference"],
            update_options={"scale": 2},
        )
        assert session.trainer_tags == ("model", "optimizer", "reference")
        assert all(lies_in(p, "model") for p in trainer.model.parameters())
        with session.rollout():
            assert all(memsaver.state(t) is memsaver.State.PAUSED for t in session.trainer_tags)
        with session.training():
            assert reference.sum() == 3 * (1 << 20)
            trainer.step()
            try:
                session.close()
            except memsaver.InvalidStateError as error:
                assert "training" in str(error)
            else:
                raise AssertionError
        session.close()
        memsaver.pause("optimizer")
        trainer.optimizer.zero_grad()  # no hook is left: nothing speaks
        """
    )


def test_weights_that_the_engine_has_are_not_sent_again(sim, tag):
    scene = Scene(tag, engine_keeps_weights=True)
    for tag_name in (scene.engine.names["weights"],):
        with memsaver.region(tag_name, backup="host"):
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


def test_a_second_rollout_sends_weights_that_the_sleep_has_lost(scene):
    with scene.session.rollout() as engine:
        first = engine.generate(X)
    with scene.session.rollout() as engine:
        assert torch.equal(engine.generate(X), first)
    assert scene.engine.heard.count("update_weights") == 2


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


def test_steps_are_bit_equal_to_those_of_a_trainer_alone(scene):
    expected = Trainer()
    expected.step()
    expected.optimizer.zero_grad()
    for _ in range(6):
        with scene.session.rollout():
            pass
        with scene.session.training():
            scene.train()
            expected.step()
            expected.optimizer.zero_grad()
            assert scene.trainer.contents() == expected.contents()
            for tensor in states_of(scene.trainer.optimizer):
                assert tensor.dim() == 0 or lies_in(tensor, scene.tags[1])


# --- reports --------------------------------------------------------------------------------------


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


def test_a_stage_tells_what_it_did(scene):
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
    # The trainer's copy is gone before the KV cache comes.
    before, after = by_stage[Stage.UPDATE].ranks[0], by_stage[Stage.PAUSE_MODEL].ranks[0]
    assert after.tag_bytes < before.tag_bytes


# --- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["wake_up weights", "update_weights", "wake_up all", "sleep"])
def test_a_rollout_whose_engine_fails_can_be_done_again(scene, call):
    class Broken(memsaver.MemsaverError):
        pass

    with scene.session.training():
        before = scene.trainer.contents()
    scene.engine.fail[call] = Broken("it broke")
    with pytest.raises(Broken, match="it broke"):
        with scene.session.rollout():
            pass
    assert scene.session.phase is Phase.IDLE
    assert scene.session.stages[-1].error == "Broken: it broke"
    with scene.session.rollout() as engine:
        with_weights = engine.generate(X)
    with scene.session.training():
        assert scene.trainer.contents() == before
        total = sum(float(t.double().sum()) for t in scene.trainer.model.state_dict().values())
        assert float(with_weights[0]) == pytest.approx(1 + total, rel=1e-4)


def test_after_a_failed_update_the_trainer_has_its_weights_and_may_train(scene):
    scene.engine.fail["update_weights"] = memsaver.MemsaverError("a bucket did not match")
    with pytest.raises(memsaver.MemsaverError, match="bucket"):
        with scene.session.rollout():
            raise AssertionError("nothing may be generated")
    assert not scene.session.engine_is_current
    assert paused(scene) == {"optimizer"}
    with scene.session.training():
        old = [bytes_of(t) for t in scene.trainer.model.state_dict().values()]
        scene.train()
        new = [bytes_of(t) for t in scene.trainer.model.state_dict().values()]
        assert new != old
    assert paused(scene) == {"weights", "kv_cache"}
    # Nobody gets the engine before it has them.
    updates = scene.engine.heard.count("update_weights")
    with scene.session.rollout() as engine:
        assert engine.heard.count("update_weights") == updates + 1
        assert engine.weights == new
        assert float(engine.generate(X)[0]) != 1


def test_what_was_done_before_a_failure_is_not_done_again(scene, sim):
    # No room for the KV cache: the weights are there, updated, and the trainer's copy is away.
    with scene.session.training():
        pass
    scene.engine.fail["wake_up all"] = memsaver.OutOfDeviceMemoryError("no room")
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        with scene.session.rollout():
            pass
    assert scene.session.engine_is_current
    assert paused(scene) == {"model", "optimizer", "kv_cache"}
    updates = scene.engine.heard.count("update_weights")
    with scene.session.rollout() as engine:
        assert float(engine.generate(X)[0]) != 1
    assert scene.engine.heard.count("update_weights") == updates


def test_no_memory_for_the_trainer_leaves_it_paused_with_its_contents(scene, sim):
    before = scene.trainer.contents()
    with scene.session.rollout():
        pass
    sim.occupy(memsaver.device_memory(0)[0])
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        with scene.session.training():
            raise AssertionError("there is no memory to train in")
    assert paused(scene) == {"model", "optimizer", "weights", "kv_cache"}
    sim.occupy(0)
    with scene.session.training():
        assert scene.trainer.contents() == before


@pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")
def test_no_driver_call_that_fails_loses_anything(scene, sim):
    session = scene.session

    def cycle():
        with session.rollout() as engine:
            assert float(engine.generate(X)[0]) != 1
        with session.training():
            assert scene.trainer.contents() == before

    with session.training():
        before = scene.trainer.contents()
    counts = {name: sim.calls(name) for name in DRIVER_CALLS}
    cycle()
    counts = {name: sim.calls(name) - count for name, count in counts.items()}
    failed = 0
    for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemcpyHtoDAsync"):
        assert counts[name], name
        for nth in range(1, counts[name] + 1):
            with sim.fault(name, sim.OUT_OF_MEMORY, nth=nth):
                try:
                    cycle()
                except memsaver.MemsaverError as error:
                    failed += 1
                    assert session.phase is Phase.IDLE
                    assert session.stages[-1].error == f"{type(error).__name__}: {error}"
            cycle()
    assert failed > 10


def test_an_exception_in_a_block_is_the_callers_and_leaves_a_session_to_go_on_with(scene):
    with pytest.raises(ZeroDivisionError):
        with scene.session.rollout():
            1 / 0  # noqa: B018
    assert scene.session.phase is Phase.IDLE
    assert paused(scene) == {"model", "optimizer"}  # as it was in the block
    with pytest.raises(KeyboardInterrupt):
        with scene.session.training():
            raise KeyboardInterrupt
    assert paused(scene) == {"weights", "kv_cache"}
    with scene.session.rollout() as engine:
        assert float(engine.generate(X)[0]) != 1


# --- what is refused ------------------------------------------------------------------------------


def test_blocks_are_not_nested(scene, in_thread):
    session = scene.session
    for outer, inner in [
        (session.rollout, session.rollout),
        (session.rollout, session.training),
        (session.training, session.rollout),
        (session.training, session.training),
    ]:
        with outer():
            phase, states, heard = session.phase, scene.states(), len(scene.engine.heard)

            def enter(inner=inner):
                with inner():
                    raise AssertionError("not within another")

            with pytest.raises(memsaver.InvalidStateError, match="inside a"):
                enter()
            with pytest.raises(memsaver.InvalidStateError, match="inside a"):
                in_thread(enter).result()
            assert (session.phase, scene.states()) == (phase, states)
            assert len(scene.engine.heard) == heard
            with pytest.raises(memsaver.InvalidStateError):
                session.close()


def test_training_during_a_rollout_is_refused(scene):
    with scene.session.rollout():
        with pytest.raises(memsaver.InvalidStateError, match="paused"):
            scene.trainer.optimizer.step()
        with pytest.raises(memsaver.InvalidStateError, match="paused"):
            scene.trainer.model(torch.ones(1, 32))


def test_generating_during_training_is_refused(scene):
    with scene.session.training():
        with pytest.raises(memsaver.InvalidStateError, match="released"):
            scene.engine.generate(X)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"backup": "none"}, "backup"),
        ({"block_timeout": -1.0}, "block_timeout"),
        ({"backup": "somewhere"}, "backup"),
        ({"timeout": 0}, "timeout"),
        ({"tags": "reference"}, "tags"),
        ({"state": None}, "state"),
        ({"state": {}}, "state is a function"),
        ({"timeout": "5"}, "timeout"),
        ({"on_stage": 3}, "on_stage"),
    ],
)
def test_bad_options_are_refused(sim, tag, options, what):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    model = object() if what == "state" else trainer.model
    with pytest.raises(memsaver.ConfigError, match=what):
        ColocatedSession(engine, model, **options)
    assert memsaver.explain(next(trainer.model.parameters())).tag is None


def test_a_model_in_a_tag_with_the_optimizer_is_refused(sim, tag):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    both = offload(trainer.model, trainer.optimizer, tag=tag("trainer"))
    with pytest.raises(memsaver.ConfigError, match="tag of its own"):
        ColocatedSession(engine, both, both, state=trainer.model.state_dict)


def test_a_trainer_without_a_backup_is_refused(sim, tag):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    model = offload(trainer.model, tag=tag("model"), backup="none")
    with pytest.raises(memsaver.ConfigError, match="no backup"):
        ColocatedSession(engine, model, state=trainer.model.state_dict)


def test_a_tag_without_a_backup_is_refused_before_anything_happens(sim, tag):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    reference = tag("reference")
    for error in (memsaver.UnknownTagError, memsaver.ConfigError):
        with pytest.raises(error, match="reference"):
            ColocatedSession(engine, trainer.model, tags=[reference])
        assert memsaver.explain(next(trainer.model.parameters())).tag is None
        assert not trainer.model._forward_pre_hooks
        with memsaver.region(reference):
            pass


def test_a_tag_that_loses_its_backup_is_refused_before_a_rollout(sim, tag):
    reference = tag("reference")
    with memsaver.region(reference, backup="host"):
        pass
    scene = Scene(tag, tags=[reference])
    with memsaver.region(reference, backup="none"):
        pass
    with pytest.raises(memsaver.ConfigError, match="no backup"):
        with scene.session.rollout():
            raise AssertionError("nothing may be generated")
    assert not paused(scene) and not scene.session.stages


def test_a_refused_close_closes_nothing(scene):
    with scene.session.rollout():
        pass
    memsaver.resume(scene.tags[0])  # the model's alone
    with pytest.raises(memsaver.InvalidStateError, match="resume it first"):
        scene.session.close()
    with scene.session.training():
        scene.train()
    with scene.session.rollout():
        with pytest.raises(memsaver.InvalidStateError):
            scene.trainer.model(torch.ones(1, 32))  # guarded still
    with scene.session.training():
        pass
    scene.session.close()
    for block in (scene.session.rollout, scene.session.training):
        with pytest.raises(memsaver.InvalidStateError, match="closed"), block():
            raise AssertionError("closed")
    assert not paused(scene) - {"weights", "kv_cache"}


def test_a_closed_handle_is_refused(sim, tag):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    handle = offload(trainer.model, tag=tag("model"))
    handle.close()
    with pytest.raises(memsaver.InvalidStateError, match="closed"):
        ColocatedSession(engine, handle, state=trainer.model.state_dict)


@pytest.mark.parametrize("missing", ["update_weights", "sleep", "wake_up"])
def test_what_is_no_engine_is_refused(sim, missing):
    methods = {name: print for name in ("update_weights", "sleep", "wake_up") if name != missing}
    trainer = Trainer()
    with pytest.raises(memsaver.ConfigError, match=rf"has no {missing}\(\)"):
        ColocatedSession(types.SimpleNamespace(**methods), trainer.model)
    assert not trainer.model._forward_pre_hooks


def test_a_session_that_cannot_begin_leaves_no_hooks(sim, tag):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    tag.names += ["model", "optimizer"]  # what a session calls its own
    with pytest.raises(memsaver.ConfigError, match="not object"):
        ColocatedSession(engine, trainer.model, object())
    assert not trainer.model._forward_pre_hooks
    other = Trainer()
    given = offload(other.model, tag=tag("model"))
    hooks = len(other.model._forward_pre_hooks)
    with pytest.raises(memsaver.ConfigError, match="not object"):
        ColocatedSession(engine, given, object(), state=other.model.state_dict)
    assert hooks and len(other.model._forward_pre_hooks) == hooks
    given.close()


@pytest.mark.long
def test_a_step_that_is_interrupted_everywhere_can_be_made_again(run_python):
    run_python(
        """
    import gc, threading
    import memsaver
    from interrupter import Interrupter
    from simulated_driver import Simulator

    sim = Simulator()
    import test_colocated_session as tests

    gc.freeze()  # the simulated driver looks for tensors among all objects
    scene = tests.Scene(lambda name: name)
    session = scene.session
    interrupter = Interrupter(".")

    def step():
        with session.rollout() as engine:
            engine.generate(tests.X)
        with session.training():
            pass

    step()
    right = scene.trainer.contents()
    for place in interrupter.places(step, every=17):
        assert session.phase is tests.Phase.IDLE, place
        step()
        assert scene.trainer.contents() == right, place
    assert place > 5000, place
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("memsaver")], threads
    """,
        timeout=110,
    )
