"""Tests the controller of an engine in which memsaver's plugin cannot refuse requests."""

import fake_sglang
import pytest
from sleep_worlds import ALL

from memsaver.errors import ConfigError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.sglang.unguarded import FAILED

VARIABLE = "MEMSAVER_SGLANG_UNGUARDED"


@pytest.fixture
def unguarded(make_world, kind, monkeypatch):
    monkeypatch.setattr(fake_sglang.Scheduler, FAILED, "a reason", raising=False)
    world = make_world(kind)
    assert not world.controller.guarded
    return world


def test_a_sleep_raises_and_changes_nothing(unguarded, monkeypatch):
    for _ in range(2):
        with pytest.raises(ConfigError, match=VARIABLE):
            unguarded.controller.sleep()
        assert unguarded.released == set() and unguarded.scheduler.model.is_intact()
        assert unguarded.controller.status is Status.AWAKE
        assert unguarded.controller.wake_up().changed == ()
    monkeypatch.setenv(VARIABLE, "1")
    unguarded.controller.sleep()
    assert unguarded.released == ALL
    unguarded.controller.wake_up()


def test_an_engine_sleeps_and_wakes_if_the_user_accepts_the_risk(unguarded, monkeypatch):
    monkeypatch.setenv(VARIABLE, "1")
    for _ in range(2):
        unguarded.controller.sleep()
        assert unguarded.released == ALL and unguarded.controller.status is Status.ASLEEP
        unguarded.controller.wake_up()
        assert unguarded.released == set() and unguarded.controller.status is Status.AWAKE
    assert not unguarded.controller.guarded and unguarded.scheduler.model.is_intact()
