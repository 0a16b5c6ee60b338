"""Tests calls and arguments that a colocated session rejects."""

import types

import pytest
import torch
from colocated_engine import TagEngine
from colocated_scene import Scene, X, paused
from trainers import Trainer

import memsaver
from memsaver.integrations.rollout import ColocatedSession
from memsaver.integrations.trainer import offload


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


def test_work_of_a_side_that_is_paused_is_refused(scene):
    with scene.session.rollout():
        with pytest.raises(memsaver.InvalidStateError, match="paused"):
            scene.trainer.optimizer.step()
        with pytest.raises(memsaver.InvalidStateError, match="paused"):
            scene.trainer.model(torch.ones(1, 32))
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
        ({"state": {}}, "state must be a function"),
        ({"timeout": "5"}, "timeout"),
        ({"on_stage": 3}, "on_stage"),
        ({"block_timeout": "soon"}, "block_timeout"),
        ({"tags": 5}, "tags"),
    ],
)
def test_bad_options_are_refused(sim, tag, options, what):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    model = object() if what == "state" else trainer.model
    with pytest.raises(memsaver.ConfigError, match=what):
        ColocatedSession(engine, model, **options)
    assert memsaver.explain(next(trainer.model.parameters())).tag is None


def test_handles_that_cannot_be_used_are_refused(sim, tag):
    trainer, other, bare = Trainer(), Trainer(), Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    closed = offload(trainer.model, tag=tag("closed"))
    closed.close()
    both = offload(other.model, other.optimizer, tag=tag("both"))
    for handles, error, what in (
        ((both, both), memsaver.ConfigError, "its own tag"),
        ((offload(bare.model, tag=tag(), backup="none"),), memsaver.ConfigError, "no backup"),
        ((closed,), memsaver.InvalidStateError, "closed"),
    ):
        with pytest.raises(error, match=what):
            ColocatedSession(engine, *handles, state=trainer.model.state_dict)


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
    memsaver.resume(scene.tags[0])  # only the model's tag
    with pytest.raises(memsaver.InvalidStateError, match="resume it first"):
        scene.session.close()
    with scene.session.training():
        scene.train()
    with scene.session.rollout():
        with pytest.raises(memsaver.InvalidStateError):
            scene.trainer.model(torch.ones(1, 32))  # still guarded
    with scene.session.training():
        pass
    scene.session.close()
    for block in (scene.session.rollout, scene.session.training):
        with pytest.raises(memsaver.InvalidStateError, match="closed"), block():
            raise AssertionError("closed")
    assert not paused(scene) - {"weights", "kv_cache"}


def test_an_object_without_an_engines_methods_is_rejected(sim):
    trainer, names = Trainer(), ("update_weights", "sleep", "wake_up")
    for missing in names:
        engine = types.SimpleNamespace(**{name: print for name in names if name != missing})
        with pytest.raises(memsaver.ConfigError, match=rf"has no {missing}\(\)"):
            ColocatedSession(engine, trainer.model)
        assert not trainer.model._forward_pre_hooks


def test_a_session_that_cannot_begin_leaves_no_hooks(sim, tag):
    trainer = Trainer()
    engine = TagEngine(trainer.model, tag("weights"), tag("kv"))
    tag.names += ["model", "optimizer"]  # a session's default tags
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
