"""Tests the state of a trainer and an engine on one device after errors and interrupts."""

import pytest
import torch
from colocated_engine import stages_of
from colocated_scene import Scene, X, paused
from looks import held
from trainers import Trainer, bytes_of

import memsaver
from memsaver.integrations.engine.errors import EngineDiedError
from memsaver.integrations.rollout import Phase, Stage
from memsaver.integrations.trainer import offload


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("call", ["wake_up weights", "update_weights", "wake_up all", "sleep"])
def test_a_rollout_whose_engine_fails_can_be_repeated(sim, tag, call, overlap):
    scene = Scene(tag, overlap=overlap)
    for _ in range(2):  # the first update shows how much memory an overlapped one needs
        with scene.session.rollout():
            pass
        with scene.session.training():
            scene.train()
            before = scene.trainer.contents()
    scene.engine.fail[call] = memsaver.DriverError("it broke")
    with pytest.raises(memsaver.DriverError, match="it broke"):
        with scene.session.rollout():
            pass
    assert scene.session.phase is Phase.IDLE and "optimizer" in paused(scene)
    errors = [report.error for report in scene.session.stages if report.error]
    assert errors == ["DriverError: it broke"]
    with scene.session.rollout() as engine:
        with_weights = engine.generate(X)
    with scene.session.training():
        pass  # at its end, states that return in the background are there
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
    # A rollout yields the engine only after the update.
    updates = scene.engine.heard.count("update_weights")
    with scene.session.rollout() as engine:
        assert engine.heard.count("update_weights") == updates + 1
        assert engine.weights == new
        assert float(engine.generate(X)[0]) != 1


def test_the_trainers_memory_returns_after_the_engine_died(scene):
    with pytest.raises(EngineDiedError, match="died here"), scene.session.rollout():
        scene.engine.fail["sleep"] = EngineDiedError("the engine is dead")
        raise EngineDiedError("the engine died here")
    with scene.session.training():
        assert paused(scene) == set()
        scene.train()
    errors = [report.error for report in scene.session.stages if report.stage is Stage.SLEEP]
    assert errors == ["EngineDiedError: the engine is dead"]
    scene.session.close()


def test_a_session_raises_if_its_state_waits_too_long_for_a_resume(sim, tag):
    module = torch.nn.Linear(4, 4)
    reference = offload(module, tag=tag("reference"))

    def state():
        if not reads:
            reference.pause()
            with held(sim):
                reads.append(reference.resume(wait=False))
                return module.state_dict()
        return scene.trainer.model.state_dict()

    reads = []
    scene = Scene(tag, state=state, timeout=0.3)
    with pytest.raises(memsaver.InvalidStateError, match=r"may take 0\.3 s") as caught:
        with scene.session.rollout():
            pass
    assert caught.value.tag == reference.tag
    reads[0].wait()
    with scene.session.rollout() as engine:
        assert len(engine.weights) == len(scene.trainer.model.state_dict())


def test_stages_before_a_failure_are_not_repeated(scene, sim):
    # There is no memory for the KV cache; the weights are mapped and updated, and the trainer's
    # copy is paused.
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


FAULTED = (
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyHtoDAsync",
    "cuMemcpyDtoHAsync",
)


@pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")
@pytest.mark.parametrize("overlap", [False, True])
def test_no_driver_call_that_fails_loses_anything(sim, tag, overlap):
    """Each cycle trains, so a stale copy of any tensor would change the later contents."""
    scene, expected = Scene(tag, overlap=overlap), Trainer()
    session, trainer = scene.session, scene.trainer
    expected.step()

    def cycle():
        with session.rollout() as engine:
            engine.generate(X)
            stages = stages_of(session)
            assert engine.weights == [bytes_of(t) for t in expected.model.state_dict().values()]
        with session.training():
            scene.train()
            while expected.done < trainer.done:
                expected.step()
            expected.optimizer.zero_grad()
            assert trainer.contents() == expected.contents()
        return stages

    for _ in range(2):  # the first update shows how much memory an overlapped one needs
        cycle()
    before = {name: sim.calls(name) for name in FAULTED}
    stages = cycle()
    counts = {name: sim.calls(name) - before[name] for name in FAULTED}
    assert (stages.index(Stage.UPDATE) < stages.index(Stage.PAUSE_OPTIMIZER)) == overlap
    failed = set()
    for name in FAULTED:
        assert counts[name], name
        for nth in range(1, counts[name] + 1):
            with sim.fault(name, sim.OUT_OF_MEMORY, nth=nth):
                try:
                    cycle()
                except memsaver.MemsaverError as error:
                    failed.add((name, nth))
                    assert session.phase is Phase.IDLE
                    assert session.stages[-1].error == f"{type(error).__name__}: {error}"
                    trainer.optimizer.zero_grad()  # of a step that did not happen
            cycle()
    assert len(failed) > 10 and {name for name, _ in failed} == set(FAULTED)


def test_an_exception_in_a_block_is_the_callers_and_leaves_a_session_to_go_on_with(scene):
    with pytest.raises(ZeroDivisionError):
        with scene.session.rollout():
            1 / 0  # noqa: B018
    assert scene.session.phase is Phase.IDLE
    assert paused(scene) == {"model", "optimizer"}  # unchanged since the block
    with pytest.raises(KeyboardInterrupt):
        with scene.session.training():
            raise KeyboardInterrupt
    assert paused(scene) == {"weights", "kv_cache"}
    with scene.session.rollout() as engine:
        assert float(engine.generate(X)[0]) != 1


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_is_interrupted_everywhere_can_be_made_again(run_python, overlap):
    run_python(
        f"    overlap = {overlap}"
        """
    import gc, threading
    import memsaver
    from interrupter import Interrupter
    from simulated_driver import Simulator

    sim = Simulator()
    import colocated_scene as tests
    from memsaver.integrations.rollout import Phase

    gc.freeze()  # the simulated driver looks for tensors among all objects
    scene = tests.Scene(lambda name: name, overlap=overlap)
    session = scene.session
    interrupter = Interrupter()

    def step():
        with session.rollout() as engine:
            engine.generate(tests.X)
        with session.training():
            pass

    for _ in range(3):
        step()
    right = scene.trainer.contents()
    for place in interrupter.places(step, every=17):
        assert session.phase is Phase.IDLE, place
        step()
        assert scene.trainer.contents() == right, place
    assert place > 5000, place
    threads = [thread.name for thread in threading.enumerate()]
    assert not [name for name in threads if name.startswith("memsaver")], threads
    """,
        timeout=110,
        with_torch=True,
    )
