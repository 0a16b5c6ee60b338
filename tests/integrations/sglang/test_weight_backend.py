"""Tests weight updates through SGLang: requests, answers, and calls that old versions lack."""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass, replace

import fake_sglang
import pytest
from sleep_worlds import started

from memsaver.errors import InvalidStateError
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.interface import Broadcast, SharedTensors, WeightLoad
from memsaver.integrations.engine.messages import Failure
from memsaver.integrations.engine.weights.checks import RankCheck, VerificationRequest
from memsaver.integrations.sglang.backend import backend_of
from memsaver.integrations.sglang.protocol import text_of_checks, verification_of

REQUEST = VerificationRequest(("a", "b"), (0,), (("digest",),))
GOOD = [RankCheck(0, "h", 1, 1, 1), RankCheck(1, "h", 2, 1, 1)]


@dataclass
class Empty:
    action: str = ""


@pytest.fixture(params=["local", "server"])
def world(request, monkeypatch):
    with contextlib.ExitStack() as cleanup:
        manager, target = started(cleanup, monkeypatch, request.param)
        for name in ("BeginWeightUpdate", "EndWeightUpdate", "CheckWeights"):
            kind = f"sglang.srt.managers.io_struct.{name}ReqInput"
            monkeypatch.setattr(kind, Empty, raising=False)
        backend = backend_of(target, timeout=30)
        yield types.SimpleNamespace(manager=manager, backend=backend, monkeypatch=monkeypatch)


def answering(world, done, message):
    """Set the engine's answer to all updates; return the list that collects the requests."""
    requests = []

    async def update(obj, request=None):
        requests.append(obj)
        return done, message

    for name in ("update_weights_from_tensor", "update_weights_from_distributed"):
        world.monkeypatch.setattr(world.manager, name, update)
    return requests


def load(backend, verification=REQUEST):
    tensors = SharedTensors(("payload",))
    return backend.load_weights(
        WeightLoad(tensors, 30, weight_version="7", verification=verification)
    )


def broadcast(backend, verification=REQUEST):
    tensors = Broadcast("g", ("a",), ("bfloat16",), ((2, 3),))
    return backend.load_weights(
        WeightLoad(tensors, 30, flush_cache=True, verification=verification)
    )


@pytest.mark.parametrize("call", [load, broadcast])
def test_requests_go_and_checks_come(world, call):
    text = f"{text_of_checks(GOOD)} Weight version updated to 7."
    requests = answering(world, True, text)
    assert call(world.backend) == GOOD
    assert verification_of(requests[0].rid) == REQUEST
    assert call(world.backend, None) == GOOD and requests[1].rid is None
    answering(world, True, "Success")  # an engine without the plugin
    assert call(world.backend) == []


MANY = tuple(f"model.layers.{number}.weight" for number in range(400))


@pytest.mark.parametrize("call", [load, broadcast])
@pytest.mark.parametrize(
    "checks",
    [
        [RankCheck(0, "h", 1, damaged=MANY), *GOOD[1:]],  # at any length
        [replace(check, unused=("a",)) for check in GOOD],  # no rank knows the name
    ],
    ids=["damaged", "unused"],
)
def test_reported_defects_are_returned_and_not_raised(world, call, checks):
    answering(world, False, text_of_checks(checks))
    assert call(world.backend) == checks


@pytest.mark.parametrize("call", [load, broadcast])
def test_a_failure_beside_good_answers_is_one(world, call):
    answering(world, False, f"{text_of_checks(GOOD)} | another scheduler's loader failed")
    with pytest.raises(EngineError, match="another scheduler's loader failed"):
        call(world.backend)


@pytest.mark.parametrize("call", [load, broadcast])
def test_a_failed_load_raises_the_ranks_own_error(world, call):
    failed = RankCheck(1, "there", 1, failure=Failure("InvalidStateError", "asleep", "weights"))
    answering(world, False, text_of_checks([GOOD[0], failed]))
    with pytest.raises(InvalidStateError, match=r"rank 1 \(there\): asleep") as caught:
        call(world.backend)
    assert caught.value.tag == "weights"
    answering(world, False, "the group is not known")
    with pytest.raises(EngineError, match="of its weights: the group is not known"):
        call(world.backend)


def test_a_session_where_the_version_has_one(world):
    world.backend.begin_update(5)  # this version has no sessions
    world.backend.end_update(5)
    asked = []

    def known(name, answer):
        async def call(obj, request=None):
            asked.append(name)
            return answer

        world.monkeypatch.setattr(world.manager, name, call, raising=False)
        world.monkeypatch.setitem(fake_sglang.CALLS, f"/{name}", Empty)

    known("begin_weight_update", (True, "Success"))
    known("end_weight_update", (False, "no session is open"))
    world.backend.begin_update(5)
    with pytest.raises(EngineError, match="no session is open"):
        world.backend.end_update(5)
    assert asked == ["begin_weight_update", "end_weight_update"]


def test_checksums_where_the_version_has_them(world):
    assert list(world.backend.checksums(5)) == []
    rows = [{"per_gpu_checksum": "x"}, {"per_gpu_checksum": "y"}]

    async def check_weights(obj, request=None):
        assert obj.action == "checksum"
        return True, "Success.", rows, "both"

    world.monkeypatch.setattr(world.manager, "check_weights", check_weights, raising=False)
    world.monkeypatch.setattr(fake_sglang.server, "CHECKER", "/weights_checker")
    assert list(world.backend.checksums(5)) == ["x", "y"]
