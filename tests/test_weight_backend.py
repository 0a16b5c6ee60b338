"""New weights through SGLang's calls: orders, answers and what older versions lack."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, replace

import pytest
import sglang_stand_in as stand_in

from memsaver.errors import InvalidStateError
from memsaver.integrations.rollout.sglang.backend import backend_of
from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.protocol import Failure
from memsaver.integrations.sglang.weight_checks import Order, RankCheck, answer_text

ORDER = Order(("a", "b"), (0,), (("digest",),))
GOOD = [RankCheck(0, "h", 1, 1, 1), RankCheck(1, "h", 2, 1, 1)]


@dataclass
class Empty:
    action: str = ""


@pytest.fixture(params=["local", "server"])
def world(request, monkeypatch):
    with stand_in.modules(monkeypatch) as classes:
        manager = classes.Tokenizer([classes.Scheduler(classes.Updater)])
        local = request.param == "local"
        engine = (stand_in.Engine if local else stand_in.Server)(manager)
        messages = sys.modules["sglang.srt.managers.io_struct"]
        for name in ("BeginWeightUpdate", "EndWeightUpdate", "CheckWeights"):
            monkeypatch.setattr(messages, f"{name}ReqInput", Empty, raising=False)
        backend = backend_of(engine if local else engine.url, timeout=30)
        yield types.SimpleNamespace(manager=manager, backend=backend, monkeypatch=monkeypatch)
        engine.shutdown()


def answering(world, done, message):
    """What the engine says of each update from now on; the requests that it gets."""
    requests = []

    async def update(obj, request=None):
        requests.append(obj)
        return done, message

    for name in ("update_weights_from_tensor", "update_weights_from_distributed"):
        world.monkeypatch.setattr(world.manager, name, update)
    return requests


def load(backend, order=ORDER):
    return backend.load_tensors(
        ["payload"],
        load_format="flattened_bucket",
        flush_cache=False,
        weight_version="7",
        order=order,
        timeout=30,
    )


def broadcast(backend, order=ORDER):
    return backend.load_broadcast(
        ["a"],
        ["bfloat16"],
        [[2, 3]],
        group_name="g",
        load_format=None,
        flush_cache=True,
        weight_version=None,
        order=order,
        timeout=30,
    )


@pytest.mark.parametrize("call", [load, broadcast])
def test_orders_go_and_answers_come(world, call):
    text = f"{answer_text(GOOD)} Weight version updated to 7."
    requests = answering(world, True, text)
    assert call(world.backend) == GOOD
    assert Order.from_text(requests[0].rid) == ORDER
    assert call(world.backend, None) == GOOD and requests[1].rid is None
    answering(world, True, "Success")  # of an engine without the plugin
    assert call(world.backend) == []


@pytest.mark.parametrize("call", [load, broadcast])
def test_what_differs_is_an_answer_however_long(world, call):
    names = tuple(f"model.layers.{number}.weight" for number in range(400))
    checks = [RankCheck(0, "h", 1, damaged=names), *GOOD[1:]]
    answering(world, False, answer_text(checks))
    assert call(world.backend) == checks


@pytest.mark.parametrize("call", [load, broadcast])
def test_names_that_no_rank_knows_are_an_answer(world, call):
    checks = [replace(check, unused=("a",)) for check in GOOD]
    answering(world, False, answer_text(checks))
    assert call(world.backend) == checks


@pytest.mark.parametrize("call", [load, broadcast])
def test_a_failure_beside_good_answers_is_one(world, call):
    answering(world, False, f"{answer_text(GOOD)} | another scheduler's loader failed")
    with pytest.raises(EngineError, match="another scheduler's loader failed"):
        call(world.backend)


@pytest.mark.parametrize("call", [load, broadcast])
def test_what_fails_is_the_ranks_own_error(world, call):
    failed = RankCheck(1, "there", 1, failure=Failure("InvalidStateError", "asleep", "weights"))
    answering(world, False, answer_text([GOOD[0], failed]))
    with pytest.raises(InvalidStateError, match=r"rank 1 \(there\): asleep"):
        call(world.backend)
    answering(world, False, "the group is not known")
    with pytest.raises(EngineError, match="the group is not known"):
        call(world.backend)


def test_a_session_where_the_version_has_one(world):
    world.backend.begin_update(5)  # this one has not
    world.backend.end_update(5)
    asked = []

    def known(name, answer):
        async def call(obj, request=None):
            asked.append(name)
            return answer

        world.monkeypatch.setattr(world.manager, name, call, raising=False)
        world.monkeypatch.setitem(stand_in.CALLS, f"/{name}", Empty)

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
    world.monkeypatch.setattr(stand_in.server, "CHECKER", "/weights_checker")
    assert list(world.backend.checksums(5)) == ["x", "y"]
