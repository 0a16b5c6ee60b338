"""Tests sleeps and wake-ups of weights that are about to be reloaded."""

import pytest
from sleep_worlds import ALL

import memsaver
from memsaver.integrations.sglang import draft_weights

BUFFER = 16  # bytes, which SGLang's own handlers keep


@pytest.fixture
def world(kind, make_world):
    return make_world(kind)


def totals(tag="weights"):
    """Return the number of bytes of the tag that have been saved and restored so far."""
    (row,) = memsaver.stats()[tag]
    return row.saved_bytes, row.restored_bytes


def are_lost(model):
    """Return whether all contents are zeros except the model's buffers, which come first."""
    contents = model.bytes()
    return contents[:BUFFER] == model.expected()[:BUFFER] and not any(contents[BUFFER:])


def test_a_sleep_need_not_save_the_weights(world):
    engine, model = world.controller, world.scheduler.model
    before = totals()
    engine.sleep(keep_weights=False)
    assert world.released == ALL and totals() == before
    engine.wake_up()
    assert world.released == set() and totals() == before and are_lost(model)
    model.fill(7)  # the update
    engine.sleep()
    engine.wake_up()
    assert model.is_intact()


def test_a_wake_up_need_not_restore_the_weights(world):
    engine, model = world.controller, world.scheduler.model
    engine.sleep()
    with world.full(), pytest.raises(memsaver.OutOfDeviceMemoryError):
        engine.wake_up(keep_weights=False)
    assert world.released == ALL
    engine.wake_up("weights")
    assert model.is_intact()  # kept by the failed call
    before = totals()
    engine.sleep()
    engine.wake_up("weights", keep_weights=False)
    assert world.released == ALL - {"weights"} and are_lost(model)
    assert totals() == before
    model.fill(7)
    engine.wake_up(keep_weights=False)  # changes nothing for weights that are awake
    assert model.is_intact()
    engine.sleep("kv_cache", keep_weights=False)
    engine.wake_up()
    assert model.is_intact()


def test_weights_beside_a_draft_model_are_kept(world, monkeypatch):
    monkeypatch.setattr(draft_weights, "_kept", [True])
    world.controller.sleep(keep_weights=False)
    world.controller.wake_up(keep_weights=False)
    assert world.scheduler.model.is_intact()


def test_without_the_plugin_the_engine_decides(kind, make_world):
    world = make_world(kind, guarded=False)
    world.controller.sleep(keep_weights=False)
    assert world.released == ALL
    world.controller.wake_up(keep_weights=False)
    assert world.released == set()
